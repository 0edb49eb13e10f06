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
//! * A server's own recording (`docs/recording.md`), all of its parts: its requests, in the order of arrival.
//!
//! A reader holds one request, or those of a recording that have not ended. PTT names blocks by their place in the file, so its reader also holds four bytes
//! for each block so far; the other forms need nothing more.

mod mooncake;
mod ptt;
mod recorded;

use std::io::BufRead;
use std::path::{Path, PathBuf};

use prefixcache_core::hints::Hint;

pub use crate::lines::TraceError;
use crate::lines::{BytesRead, Fault, Lines};
use crate::recording::part_path;

/// The most tokens of one request: more is taken for an error in the file.
const MAX_TOKENS: u64 = 1 << 26;

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
        self.num_prompt_blocks
            .min(self.input_tokens.saturating_sub(1) / block_size)
    }
}

/// What a file says of itself.
struct Header {
    name: Option<String>,
    block_size: usize,
}

/// A form of trace.
trait Form: Send {
    /// The request of a line, in place of the one that `request` held; false if the line is of none.
    fn read_line(&mut self, line: &str, request: &mut Request) -> Result<bool, Fault>;

    /// The next of the requests that were held back, if it may be told of now; `at_end` it may.
    fn take_held(&mut self, _request: &mut Request, _at_end: bool) -> bool {
        false
    }

    /// The number of the file that goes on where this one ends, if one does.
    fn next_part(&self) -> Option<u64> {
        None
    }

    /// Whether the last line may be cut: it was being written when its writer was killed.
    fn may_be_cut(&self) -> bool {
        false
    }
}

/// What the first line begins: the form, the header, and whether that line is a request itself.
struct Beginning {
    form: Box<dyn Form>,
    header: Header,
    is_request: bool,
}

/// Requests in the order of their arrival, one after the other.
pub struct Reader {
    /// The first file; none where the lines do not come of one.
    path: Option<PathBuf>,
    lines: Lines,
    bytes: BytesRead,
    form: Box<dyn Form>,
    name: String,
    block_size: usize,
    /// Whether the first line is a request that was not told of yet.
    first_is_unread: bool,
    last_ms: u64,
}

impl Reader {
    /// Opens a file of any form.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let bytes = BytesRead::default();
        let lines = Lines::open(path, &bytes)?;
        let mut reader = Self::begin(&path.display().to_string(), lines, bytes)?;
        reader.path = Some(path.into());
        Ok(reader)
    }

    /// Reads unpacked lines of any form, of what errors call `file`.
    pub fn from_lines(
        file: &str,
        lines: impl BufRead + Send + 'static,
    ) -> Result<Self, TraceError> {
        let lines = Lines::new(file, Box::new(lines));
        Self::begin(file, lines, BytesRead::default())
    }

    fn begin(file: &str, mut lines: Lines, bytes: BytesRead) -> Result<Self, TraceError> {
        let beginning = match lines.advance()? {
            true => begin(lines.line()),
            false => Err(Fault::new("header", "is missing: the file is empty")),
        };
        let beginning = beginning.map_err(|fault| lines.invalid(fault))?;
        Ok(Self {
            path: None,
            lines,
            bytes,
            form: beginning.form,
            name: beginning.header.name.unwrap_or_else(|| file.into()),
            block_size: beginning.header.block_size,
            first_is_unread: beginning.is_request,
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
        while !self.form.take_held(request, false) {
            if !std::mem::take(&mut self.first_is_unread) && !self.lines.advance()? {
                if self.open_next_part()? {
                    continue;
                }
                return Ok(self.form.take_held(request, true));
            }
            match self.form.read_line(self.lines.line(), request) {
                Ok(false) => {}
                Ok(true) => break,
                Err(_) if self.lines.is_cut() && self.form.may_be_cut() => {}
                Err(fault) => return Err(self.lines.invalid(fault)),
            }
        }
        check_order(request.time_ms, &mut self.last_ms)
            .map_err(|fault| self.lines.invalid(fault))?;
        Ok(true)
    }

    /// Whether another file goes on where this one ended.
    fn open_next_part(&mut self) -> Result<bool, TraceError> {
        let (Some(path), Some(part)) = (&self.path, self.form.next_part()) else {
            return Ok(false);
        };
        self.lines = Lines::open(&part_path(path, part), &self.bytes)?;
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

/// Reads the first line, which tells the form.
fn begin(line: &str) -> Result<Beginning, Fault> {
    if recorded::is_first_line(line) {
        return recorded::begin(line);
    }
    if line.starts_with('{') {
        return Ok(mooncake::begin());
    }
    ptt::begin(line)
}

/// The finalizer of SplitMix64: a permutation, each bit of which depends on all bits.
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// A count of tokens, if any request can have so many.
fn check_tokens(field: &'static str, tokens: u64) -> Result<usize, Fault> {
    if tokens <= MAX_TOKENS {
        return Ok(tokens as usize);
    }
    let reason = format!("must be at most {MAX_TOKENS} tokens, not {tokens}");
    Err(Fault::new(field, reason))
}
