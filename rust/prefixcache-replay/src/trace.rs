//! Traces of requests whose prompts share prefixes, read as a stream.
//!
//! These forms are read, plain or compressed by gzip or xz:
//!
//! * Mooncake's JSON lines: `{"timestamp", "input_length", "output_length", "hash_ids"}`, blocks of 512 tokens.
//! * PTT, the prefix-tree trace. Line 1: `#PTT1 name=.. block=B cols=..`. Then one request a line:
//!   `t_ms,in_tokens,out_tokens,session,class,fork,n_new,gfork,gnew`. The prompt is the path to node `fork`
//!   (-1: the root) and `n_new` new nodes under it, `in_tokens / B` nodes in all; the blocks that the answer
//!   fills are the path to `gfork` and `gnew` new nodes. New nodes are numbered from 0 in that order.
//!
//! * A server's own recording (`docs/reference/recording.md`), all of its parts: its requests, in the order of arrival.
//!
//! A reader holds one request, or those of a recording that have not ended. PTT names blocks by their place in the file, so its reader also holds four bytes
//! for each block so far; the other forms need nothing more.

mod mooncake;
mod ptt;
mod recorded;

use std::path::Path;

use prefixcache_core::hints::Hint;

pub use crate::lines::TraceError;
use crate::lines::{BytesRead, Fault, Lines, check_tokens};
use crate::recording::Events;
use mooncake::Mooncake;
use recorded::Recorded;

/// A full block of a prompt or answer. Blocks of a trace are the same where content and all before it are.
pub type BlockKey = u64;

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// When it arrived, in milliseconds from the trace's start.
    pub time_ms: u64,
    /// Tokens of its prompt.
    pub input_tokens: usize,
    /// Tokens of its answer.
    pub output_tokens: usize,
    /// Its client's session, where the trace knows it.
    pub session: Option<u32>,
    /// The full blocks of its prompt, then those that its answer fills, where the trace knows them.
    pub blocks: Vec<BlockKey>,
    /// How many of the blocks are of the prompt.
    pub num_prompt_blocks: usize,
    /// What its client said of its tokens.
    pub hints: Vec<Hint>,
}

impl Request {
    /// The full blocks of its prompt, first block first.
    #[must_use]
    pub fn prompt(&self) -> &[BlockKey] {
        &self.blocks[..self.num_prompt_blocks]
    }

    /// The leading blocks of its prompt that may hit: at least one token is always computed.
    #[must_use]
    pub fn most_hits(&self, block_size: usize) -> usize {
        self.num_prompt_blocks.min(self.input_tokens.saturating_sub(1) / block_size)
    }
}

/// A form of trace in which each line is a request.
trait Form: Send {
    /// Writes the request of a line over `request`.
    fn read_line(&mut self, line: &str, request: &mut Request) -> Result<(), Fault>;
}

enum Source {
    Plain { lines: Lines, form: Box<dyn Form> },
    Recorded(Box<Recorded>),
}

/// Requests in the order of their arrival, one after the other.
pub struct Reader {
    bytes: BytesRead,
    source: Source,
    name: String,
    block_size: usize,
    last_ms: u64,
}

impl Reader {
    /// Opens a file of any form, which its first line tells.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let bytes = BytesRead::default();
        let mut lines = Lines::open(path, &bytes)?;
        if !lines.advance()? {
            let fault = Fault::new("header", "is missing: the file is empty");
            return Err(lines.invalid(fault));
        }
        let first = lines.line();
        let (source, name, block_size) = if recorded::is_first_line(first) {
            let events = Events::begin(path, lines, bytes.clone())?;
            let block_size = events.header().block_size;
            let recorded = Box::new(Recorded::new(events));
            (Source::Recorded(recorded), None, block_size)
        } else if first.starts_with('{') {
            lines.unread();
            let form = Box::new(Mooncake);
            (Source::Plain { lines, form }, None, mooncake::BLOCK_SIZE)
        } else {
            let begun = ptt::begin(first);
            let (form, name) = begun.map_err(|fault| lines.invalid(fault))?;
            let block_size = form.block_size();
            let form = Box::new(form);
            (Source::Plain { lines, form }, name, block_size)
        };
        Ok(Self {
            bytes,
            source,
            name: name.unwrap_or_else(|| path.display().to_string()),
            block_size,
            last_ms: 0,
        })
    }

    /// What the file calls itself; else its path.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Bytes of the opened file that were read so far, packed as they stand in it.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes.get()
    }

    /// Reads the next request into `request`, whose memory is used again; false at the end.
    ///
    /// After an error the reader is of no further use.
    pub fn read(&mut self, request: &mut Request) -> Result<bool, TraceError> {
        let (lines, form) = match &mut self.source {
            Source::Recorded(recorded) => return recorded.read(request),
            Source::Plain { lines, form } => (lines, form),
        };
        if !lines.advance()? {
            return Ok(false);
        }
        let read = form.read_line(lines.line(), request);
        read.and_then(|()| check_order(request.time_ms, &mut self.last_ms))
            .map_err(|fault| lines.invalid(fault))?;
        Ok(true)
    }
}

impl Iterator for Reader {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut request = Request::default();
        match self.read(&mut request) {
            Ok(true) => Some(Ok(request)),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

/// Takes the time of a request, unless it came before the last one.
fn check_order(time_ms: u64, last_ms: &mut u64) -> Result<(), Fault> {
    if time_ms < *last_ms {
        let reason = format!("must not be before the request above ({last_ms} ms): {time_ms} ms");
        return Err(Fault::new("time", reason));
    }
    *last_ms = time_ms;
    Ok(())
}
