//! A server's own recording, read as a plain trace: what was asked, not what the server made of it.
//!
//! `docs/recording.md` specifies the form. A request is told of once its answer has ended, but in the order of
//! arrival, so the requests since the oldest one that is not answered are held, up to [`MAX_HELD`].

use std::collections::VecDeque;

use super::{Beginning, BlockKey, Fault, Form, Request, check_tokens, mix};
use crate::recording::{Event, Header, Line, RecordedHint, hint_of, parse_names};

/// The most requests that wait for an earlier one's end: beyond, that one is told of as it is.
const MAX_HELD: usize = 1 << 14;

/// Requests whose answer has not ended, or that wait for such a one.
#[derive(Default)]
struct Held {
    requests: VecDeque<(Request, bool)>,
    /// The id of the first of them.
    first: u64,
}

impl Held {
    fn get(&mut self, id: u64) -> Option<&mut (Request, bool)> {
        let index = usize::try_from(id.checked_sub(self.first)?).ok()?;
        self.requests.get_mut(index)
    }

    fn take(&mut self, at_end: bool) -> Option<Request> {
        let (_, has_ended) = self.requests.front()?;
        if !has_ended && !at_end && self.requests.len() <= MAX_HELD {
            return None;
        }
        self.first += 1;
        self.requests.pop_front().map(|(request, _)| request)
    }
}

/// The form after its first line.
struct Recorded {
    recording: String,
    part: u64,
    block_size: usize,
    held: Held,
    goes_on: bool,
    /// What a reset changes: after it nothing hits that was there before.
    epoch: u64,
}

/// Whether a line is the first one of a recording.
pub(super) fn is_first_line(line: &str) -> bool {
    line.contains("\"prefixcache_trace\"")
}

/// Reads the first line.
pub(super) fn begin(line: &str) -> Result<Beginning, Fault> {
    let header = Header::parse(line)?;
    Ok(Beginning {
        header: super::Header {
            name: None,
            block_size: header.block_size,
        },
        form: Box::new(Recorded {
            recording: header.recording,
            part: header.part,
            block_size: header.block_size,
            held: Held::default(),
            goes_on: false,
            epoch: 0,
        }),
        is_request: false,
    })
}

impl Recorded {
    fn keys(&self, names: &str) -> Result<Vec<BlockKey>, Fault> {
        let mut keys = parse_names(names)?;
        keys.iter_mut().for_each(|key| *key ^= self.epoch);
        Ok(keys)
    }

    fn add(
        &mut self,
        (time_ms, id, tokens): (u64, u64, usize),
        names: &str,
        hints: &[RecordedHint],
    ) -> Result<(), Fault> {
        let next = self.held.first + self.held.requests.len() as u64;
        if id != next {
            return Err(Fault::new("id", format!("must be {next}, not {id}")));
        }
        let blocks = self.keys(names)?;
        let input_tokens = check_tokens("tokens", tokens as u64)?;
        let full = input_tokens / self.block_size;
        if blocks.len() > full {
            let reason = format!(
                "must be of at most {full} blocks, which its tokens fill, not {}",
                blocks.len()
            );
            return Err(Fault::new("names", reason));
        }
        let request = Request {
            time_ms,
            input_tokens,
            num_prompt_blocks: blocks.len(),
            blocks,
            hints: hints.iter().map(hint_of).collect::<Result<_, _>>()?,
            ..Request::default()
        };
        self.held.requests.push_back((request, false));
        Ok(())
    }

    fn go_on(&mut self, id: u64, names: &str) -> Result<(), Fault> {
        let keys = self.keys(names)?;
        if let Some((request, _)) = self.held.get(id) {
            request.blocks.extend(keys);
        }
        Ok(())
    }

    fn end(&mut self, ids: &[u64], tokens: &[usize]) -> Result<(), Fault> {
        for (&id, &tokens) in ids.iter().zip(tokens) {
            let tokens = check_tokens("tokens", tokens as u64)?;
            if let Some((request, has_ended)) = self.held.get(id) {
                request.output_tokens = tokens.saturating_sub(request.input_tokens);
                *has_ended = true;
            }
        }
        Ok(())
    }

    /// The first line of the next part.
    fn begin_part(&mut self, line: &str) -> Result<(), Fault> {
        Header::parse(line)?.check_follows(&self.recording, self.part)?;
        self.part += 1;
        self.goes_on = false;
        Ok(())
    }
}

impl Form for Recorded {
    fn read_line(&mut self, line: &str, _: &mut Request) -> Result<bool, Fault> {
        if self.goes_on {
            self.begin_part(line)?;
            return Ok(false);
        }
        let Line { t, event } = Line::parse(line)?;
        match event {
            Event::Add {
                id,
                tokens,
                names,
                hints,
                ..
            } => self.add((t, id, tokens), names, &hints)?,
            Event::Start { id, names, .. } => self.go_on(id, names)?,
            Event::Publish { ids, names, .. } => {
                let mut each = ids.iter().zip(names);
                each.try_for_each(|(&id, names)| self.go_on(id, names))?;
            }
            Event::End { ids, tokens, .. } => self.end(&ids, &tokens)?,
            Event::Reset {} | Event::Weights { .. } => self.epoch = mix(self.epoch + 1),
            Event::Next {} => self.goes_on = true,
            // What the server did, and nothing of requests.
            Event::Slots { .. }
            | Event::Anchor { .. }
            | Event::Drop { .. }
            | Event::Preempt { .. }
            | Event::Restart { .. }
            | Event::Demote { .. }
            | Event::Expire {}
            | Event::Move { .. }
            | Event::Resize { .. }
            | Event::Counters(_)
            | Event::Stop { .. } => {}
        }
        Ok(false)
    }

    fn take_held(&mut self, request: &mut Request, at_end: bool) -> bool {
        let held = self.held.take(at_end);
        held.map(|held| *request = held).is_some()
    }

    fn next_part(&self) -> Option<u64> {
        self.goes_on.then_some(self.part + 1)
    }

    fn may_be_cut(&self) -> bool {
        true
    }
}
