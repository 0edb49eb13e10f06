//! Traces of requests whose prompts share prefixes.
//!
//! Two forms are read, plain or compressed by gzip or xz:
//!
//! * Mooncake's JSON lines: `{"timestamp", "input_length", "output_length", "hash_ids"}`, blocks of 512 tokens.
//! * PTT, the prefix-tree trace. Line 1: `#PTT1 name=.. block=B cols=..`. Then one request a line:
//!   `t_ms,in_tokens,out_tokens,session,class,fork,n_new,gfork,gnew`. The prompt is the path to node `fork`
//!   (-1: the root) and `n_new` new nodes under it, `in_tokens / B` nodes in all; the blocks that the answer
//!   fills are the path to `gfork` and `gnew` new nodes. New nodes are numbered from 0 in that order.

mod mooncake;
mod ptt;
mod tree;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use thiserror::Error;

pub use tree::{Node, Tree};

/// The most tokens of one request: more is taken for an error in the file.
const MAX_TOKENS: u64 = 1 << 26;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrived, in milliseconds from the trace's start.
    pub time_ms: u64,
    /// Tokens of its prompt.
    pub input_tokens: usize,
    /// Tokens of its answer.
    pub output_tokens: usize,
    /// Its client's session, where the trace knows it.
    pub session: Option<u32>,
    /// The last full block of its prompt; none where the prompt fills no block.
    pub prompt: Option<Node>,
    /// The last block that its answer fills, or that of its prompt.
    pub answer: Option<Node>,
}

/// Requests in the order of their arrival, and the tree of their blocks.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What the file calls itself.
    pub name: String,
    /// Tokens in a block.
    pub block_size: usize,
    /// All blocks, each under the one before it.
    pub tree: Tree,
    /// The requests.
    pub requests: Vec<Request>,
}

/// What is wrong with a trace.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read, or not to its end.
    #[error("{file}: {source}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// A line is not what its form asks for.
    #[error("{file}, line {line}: {field} {reason}")]
    Invalid {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The field of the line.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// What is wrong with one field of a line.
#[derive(Debug, PartialEq, Eq)]
struct Fault {
    field: &'static str,
    reason: String,
}

impl Fault {
    fn new(field: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self { field, reason }
    }
}

/// A form of trace: what a line adds to it.
trait Form {
    fn read_line(&mut self, line: &str, trace: &mut Trace) -> Result<(), Fault>;
}

impl Trace {
    /// Reads a file of either form.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let file = path.display().to_string();
        match open(path) {
            Ok(lines) => Self::read_lines(&file, lines),
            Err(source) => Err(TraceError::Unreadable { file, source }),
        }
    }

    /// Reads unpacked lines of either form, of what errors call `file`.
    pub fn read_lines(file: &str, lines: impl BufRead) -> Result<Self, TraceError> {
        let invalid = |line, Fault { field, reason }| TraceError::Invalid {
            file: file.into(),
            line,
            field,
            reason,
        };
        let mut trace = Self {
            name: file.into(),
            ..Self::default()
        };
        let mut form: Option<Box<dyn Form>> = None;
        for (index, line) in lines.lines().enumerate() {
            let line = line.map_err(|source| TraceError::Unreadable {
                file: file.into(),
                source,
            })?;
            let outcome = match &mut form {
                Some(form) => form.read_line(&line, &mut trace),
                None => begin(&line, &mut trace).map(|new| form = Some(new)),
            };
            outcome.map_err(|fault| invalid(index + 1, fault))?;
        }
        match form {
            Some(_) => Ok(trace),
            None => Err(invalid(
                1,
                Fault::new("header", "is missing: the file is empty"),
            )),
        }
    }

    /// The full blocks of a request's prompt, first block first.
    #[must_use]
    pub fn prompt(&self, request: &Request) -> Vec<Node> {
        self.tree.path(request.prompt)
    }

    /// How many blocks all prompts have, each counted once.
    #[must_use]
    pub fn num_prompt_blocks(&self) -> usize {
        let mut seen = vec![false; self.tree.len()];
        for request in &self.requests {
            let unseen = self
                .tree
                .upward(request.prompt)
                .take_while(|node| !std::mem::replace(&mut seen[node.index()], true));
            unseen.for_each(drop);
        }
        seen.into_iter().filter(|&seen| seen).count()
    }

    /// Adds a request, unless it came before the last one.
    fn push(&mut self, request: Request) -> Result<(), Fault> {
        let last = self.requests.last().map_or(0, |last| last.time_ms);
        if request.time_ms < last {
            let reason = format!(
                "must not be before the line above ({last} ms): {} ms",
                request.time_ms
            );
            return Err(Fault::new("time", reason));
        }
        self.requests.push(request);
        Ok(())
    }
}

/// Reads the first line, which tells the form.
fn begin(line: &str, trace: &mut Trace) -> Result<Box<dyn Form>, Fault> {
    if line.starts_with('{') {
        let mut form = mooncake::Mooncake::default();
        form.begin(trace);
        form.read_line(line, trace)?;
        return Ok(Box::new(form));
    }
    Ok(Box::new(ptt::Ptt::begin(line, trace)?))
}

/// The lines of a file, unpacked if it is packed.
fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    const GZIP: &[u8] = &[0x1f, 0x8b];
    const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
    let mut file = BufReader::new(File::open(path)?);
    let start = file.fill_buf()?;
    let reader: Box<dyn Read> = if start.starts_with(GZIP) {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if start.starts_with(XZ) {
        Box::new(lzma_rust2::XzReader::new(file, true))
    } else {
        return Ok(Box::new(file));
    };
    Ok(Box::new(BufReader::new(reader)))
}

/// A count of tokens, if any request can have so many.
fn check_tokens(field: &'static str, tokens: u64) -> Result<usize, Fault> {
    if tokens <= MAX_TOKENS {
        return Ok(tokens as usize);
    }
    let reason = format!("must be at most {MAX_TOKENS} tokens, not {tokens}");
    Err(Fault::new(field, reason))
}
