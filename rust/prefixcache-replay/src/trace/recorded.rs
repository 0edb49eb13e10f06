//! A server's own recording, read as a plain trace: what was asked, not what the server made of it.
//!
//! `docs/recording.md` specifies the form. A request is told of once its answer has ended, but in the order of
//! arrival, so the requests since the oldest one that is not answered are held, up to [`MAX_HELD`].

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::Duration;

use prefixcache_core::hints::Hint;
use serde::Deserialize;

use super::{Beginning, BlockKey, Fault, Form, Header, Request, check_tokens, mix};

/// The version of the form that is read.
const VERSION: u64 = 1;

/// The most requests that wait for an earlier one's end: beyond, that one is told of as it is.
const MAX_HELD: usize = 1 << 14;

/// Hexadecimal digits of a block's name.
const DIGITS: usize = 16;

/// Events that say what the server did, and nothing of requests.
const SKIPPED: [&str; 11] = [
    "slots", "anchor", "drop", "preempt", "restart", "demote", "expire", "move", "resize",
    "counters", "stop",
];

#[derive(Deserialize)]
struct FirstLine {
    prefixcache_trace: u64,
    #[serde(default)]
    recording: serde_json::Value,
    #[serde(default)]
    part: u64,
    block_size: usize,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    e: Cow<'a, str>,
}

type RecordedHint = (usize, Option<usize>, u8, Option<f64>);

#[derive(Deserialize)]
struct Add<'a> {
    t: f64,
    id: u64,
    tokens: u64,
    #[serde(borrow, default)]
    names: Cow<'a, str>,
    #[serde(default)]
    hints: Vec<RecordedHint>,
}

#[derive(Deserialize)]
struct Start<'a> {
    id: u64,
    #[serde(borrow, default)]
    names: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Publish<'a> {
    ids: Vec<u64>,
    #[serde(borrow, default)]
    names: Vec<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct End {
    ids: Vec<u64>,
    tokens: Vec<u64>,
}

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
    recording: serde_json::Value,
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
    let first = first_line(line)?;
    Ok(Beginning {
        header: Header {
            name: None,
            block_size: first.block_size,
        },
        form: Box::new(Recorded {
            recording: first.recording,
            part: first.part,
            block_size: first.block_size,
            held: Held::default(),
            goes_on: false,
            epoch: 0,
        }),
        is_request: false,
    })
}

fn first_line(line: &str) -> Result<FirstLine, Fault> {
    // The version first: what else a line of another one has is not known.
    #[derive(Deserialize)]
    struct Version {
        prefixcache_trace: u64,
    }
    let version: Version = parse(line)?;
    if version.prefixcache_trace != VERSION {
        let reason = format!(
            "must be version {VERSION}, not {}",
            version.prefixcache_trace
        );
        return Err(Fault::new("prefixcache_trace", reason));
    }
    let first: FirstLine = parse(line)?;
    debug_assert_eq!(first.prefixcache_trace, VERSION);
    if first.block_size == 0 {
        return Err(Fault::new("block_size", "must be at least 1"));
    }
    Ok(first)
}

fn parse<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T, Fault> {
    serde_json::from_str(line)
        .map_err(|error| Fault::new("object", format!("cannot be read: {error}")))
}

impl Recorded {
    fn keys(&self, names: &str) -> Result<Vec<BlockKey>, Fault> {
        let fault = || {
            Fault::new(
                "names",
                format!("must have {DIGITS} hexadecimal digits a block"),
            )
        };
        if !names.len().is_multiple_of(DIGITS) || !names.is_ascii() {
            return Err(fault());
        }
        let starts = (0..names.len()).step_by(DIGITS);
        starts
            .map(|start| {
                let name = u64::from_str_radix(&names[start..start + DIGITS], 16);
                name.map(|name| name ^ self.epoch).map_err(|_| fault())
            })
            .collect()
    }

    fn add(&mut self, line: &str) -> Result<(), Fault> {
        let add: Add = parse(line)?;
        let next = self.held.first + self.held.requests.len() as u64;
        if add.id != next {
            return Err(Fault::new("id", format!("must be {next}, not {}", add.id)));
        }
        let blocks = self.keys(&add.names)?;
        let input_tokens = check_tokens("tokens", add.tokens)?;
        let full = input_tokens / self.block_size;
        if blocks.len() > full {
            let reason = format!(
                "must be of at most {full} blocks, which its tokens fill, not {}",
                blocks.len()
            );
            return Err(Fault::new("names", reason));
        }
        if !add.t.is_finite() || add.t < 0.0 {
            return Err(Fault::new("t", "must be milliseconds from 0"));
        }
        let request = Request {
            time_ms: add.t as u64,
            input_tokens,
            num_prompt_blocks: blocks.len(),
            blocks,
            hints: add.hints.into_iter().map(hint).collect::<Result<_, _>>()?,
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

    fn publish(&mut self, line: &str) -> Result<(), Fault> {
        let publish: Publish = parse(line)?;
        let mut each = publish.ids.iter().zip(&publish.names);
        each.try_for_each(|(&id, names)| self.go_on(id, names))
    }

    fn end(&mut self, line: &str) -> Result<(), Fault> {
        let end: End = parse(line)?;
        for (&id, &tokens) in end.ids.iter().zip(&end.tokens) {
            let tokens = check_tokens("tokens", tokens)?;
            if let Some((request, has_ended)) = self.held.get(id) {
                request.output_tokens = tokens.saturating_sub(request.input_tokens);
                *has_ended = true;
            }
        }
        Ok(())
    }

    /// The first line of the next part.
    fn begin_part(&mut self, line: &str) -> Result<(), Fault> {
        let first = first_line(line)?;
        if first.recording != self.recording || first.part != self.part + 1 {
            let reason = format!("must be {} of the same recording", self.part + 1);
            return Err(Fault::new("part", reason));
        }
        self.part += 1;
        self.goes_on = false;
        Ok(())
    }
}

fn hint((start, end, priority, seconds): RecordedHint) -> Result<Hint, Fault> {
    let ttl = seconds.map(Duration::try_from_secs_f64).transpose();
    let ttl = ttl.map_err(|_| Fault::new("hints", "must have seconds from 0"))?;
    Ok(Hint {
        start,
        end,
        priority,
        ttl,
    })
}

impl Form for Recorded {
    fn read_line(&mut self, line: &str, _: &mut Request) -> Result<bool, Fault> {
        if self.goes_on {
            self.begin_part(line)?;
            return Ok(false);
        }
        let event: Event = parse(line)?;
        match &*event.e {
            "add" => self.add(line)?,
            "start" => {
                let start: Start = parse(line)?;
                self.go_on(start.id, &start.names)?;
            }
            "publish" => self.publish(line)?,
            "end" => self.end(line)?,
            "reset" | "weights" => self.epoch = mix(self.epoch + 1),
            "next" => self.goes_on = true,
            other if SKIPPED.contains(&other) => {}
            other => {
                return Err(Fault::new(
                    "e",
                    format!("is no event of version {VERSION}: {other:?}"),
                ));
            }
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
