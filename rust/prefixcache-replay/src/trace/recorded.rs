//! A server's own recording, read as a plain trace: what was asked, not what the server made of it.
//!
//! `docs/reference/recording.md` specifies the form. A request is returned once its answer has ended, but in the order of
//! arrival, so the requests since the oldest one that is not answered are held, up to [`MAX_HELD`].

use std::collections::VecDeque;

use prefixcache_serving::mix::mix;

use super::{BlockKey, Fault, Request, TraceError, check_tokens};
use crate::recording::{Added, Event, Events, Line, hint_of, parse_names};

/// The most requests that wait for an earlier one's end: beyond, that one is returned as it is.
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

/// Requests of a recording, as far as they are known.
struct Known {
    block_size: usize,
    held: Held,
    /// What a reset changes: after it nothing hits that was there before.
    epoch: u64,
}

/// Whether a line is the first one of a recording.
pub(super) fn is_first_line(line: &str) -> bool {
    line.contains("\"prefixcache_trace\"")
}

impl Known {
    fn keys(&self, names: &str) -> Result<Vec<BlockKey>, Fault> {
        let mut keys = parse_names(names)?;
        keys.iter_mut().for_each(|key| *key ^= self.epoch);
        Ok(keys)
    }

    fn add(&mut self, time_ms: u64, added: &Added<'_>) -> Result<(), Fault> {
        let next = self.held.first + self.held.requests.len() as u64;
        if added.id != next {
            let reason = format!("must be {next}, not {}", added.id);
            return Err(Fault::new("id", reason));
        }
        let blocks = self.keys(added.names)?;
        let input_tokens = check_tokens("tokens", added.tokens as u64)?;
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
            hints: added.hints.iter().map(hint_of).collect::<Result<_, _>>()?,
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

    fn note(&mut self, Line { t, event }: Line<'_>) -> Result<(), Fault> {
        match event {
            Event::Add(added) => self.add(t, &added)?,
            Event::Start(started) => self.go_on(started.id, started.names)?,
            Event::Publish { ids, names, .. } => {
                let mut each = ids.iter().zip(names);
                each.try_for_each(|(&id, names)| self.go_on(id, names))?;
            }
            Event::End { ids, tokens, .. } => self.end(&ids, &tokens)?,
            Event::Restart { id } => {
                if let Some((request, _)) = self.held.get(id) {
                    request.blocks.truncate(request.num_prompt_blocks);
                }
            }
            Event::Reset {} | Event::Weights { .. } => self.epoch = mix(self.epoch + 1),
            // What the server did, and nothing of requests.
            _ => {}
        }
        Ok(())
    }
}

/// The requests of a recording, of all its parts.
pub(super) struct Recorded {
    events: Events,
    known: Known,
    is_at_end: bool,
}

impl Recorded {
    pub(super) fn new(events: Events) -> Self {
        let block_size = events.header().block_size;
        let held = Held::default();
        Self { known: Known { block_size, held, epoch: 0 }, events, is_at_end: false }
    }

    /// As [`super::Reader::read`].
    pub(super) fn read(&mut self, request: &mut Request) -> Result<bool, TraceError> {
        loop {
            if let Some(held) = self.known.held.take(self.is_at_end) {
                *request = held;
                return Ok(true);
            }
            if self.is_at_end {
                return Ok(false);
            }
            match self.events.read()? {
                None => self.is_at_end = true,
                Some(Line { event: Event::Next {}, .. }) => self.events.open_next()?,
                Some(line) => {
                    let noted = self.known.note(line);
                    noted.map_err(|fault| self.events.invalid(fault))?;
                }
            }
        }
    }
}
