//! The lines of a file, unpacked if it is packed, none of them longer than a request can be.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// The most bytes of a line: more is taken for an error in the file.
const MAX_LINE: usize = 1 << 26;

/// The most tokens of one request: more is taken for an error in the file.
const MAX_TOKENS: u64 = 1 << 26;

/// What is wrong with a trace.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read, or not to its end.
    #[error("{file}, line {line}: cannot be read: {source}")]
    Unreadable {
        /// The file.
        file: String,
        /// The line that could not be read, from 1.
        line: usize,
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
pub(crate) struct Fault {
    field: &'static str,
    reason: String,
}

impl Fault {
    pub(crate) fn new(field: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self { field, reason }
    }
}

/// Lines, one after the other.
pub(crate) struct Lines {
    file: String,
    source: Box<dyn BufRead + Send>,
    /// The one that was read last, with its end.
    line: String,
    /// Its number, from 1.
    number: usize,
    /// Whether the line is to be read once more.
    is_unread: bool,
}

/// The bytes of a file that were read so far, packed as they stand in it.
#[derive(Clone, Default)]
pub(crate) struct BytesRead(Arc<AtomicU64>);

impl BytesRead {
    pub(crate) fn get(&self) -> u64 {
        // Relaxed: a count that is shown, and nothing else is read by it.
        self.0.load(Ordering::Relaxed)
    }
}

/// A file whose reads are counted.
struct Counted {
    file: File,
    bytes: BytesRead,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        // Relaxed: as in `BytesRead::get`.
        self.bytes.0.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// What a file holds, unpacked if it is packed.
fn unpack(file: File, bytes: &BytesRead) -> io::Result<Box<dyn BufRead + Send>> {
    const GZIP: &[u8] = &[0x1f, 0x8b];
    const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
    let bytes = bytes.clone();
    let mut file = BufReader::new(Counted { file, bytes });
    let start = file.fill_buf()?;
    let reader: Box<dyn Read + Send> = if start.starts_with(GZIP) {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if start.starts_with(XZ) {
        Box::new(lzma_rust2::XzReader::new(file, true))
    } else {
        return Ok(Box::new(file));
    };
    Ok(Box::new(BufReader::new(reader)))
}

impl Lines {
    /// The lines of a file, whose reads are counted in `bytes`.
    pub(crate) fn open(path: &Path, bytes: &BytesRead) -> Result<Self, TraceError> {
        let file = path.display().to_string();
        match File::open(path).and_then(|file| unpack(file, bytes)) {
            Ok(source) => {
                Ok(Self { file, source, line: String::new(), number: 0, is_unread: false })
            }
            Err(source) => Err(TraceError::Unreadable { file, line: 1, source }),
        }
    }

    /// Whether the line has no end.
    pub(crate) fn is_cut(&self) -> bool {
        !self.line.ends_with('\n')
    }

    /// Where the line stands.
    pub(crate) fn place(&self) -> String {
        format!("{}, line {}", self.file, self.number)
    }

    /// An error of the line.
    pub(crate) fn invalid(&self, Fault { field, reason }: Fault) -> TraceError {
        TraceError::Invalid { file: self.file.clone(), line: self.number, field, reason }
    }

    /// Lets the next call of [`Self::advance`] stay at this line.
    pub(crate) fn unread(&mut self) {
        self.is_unread = true;
    }

    /// Goes on to the next line; false at the end of the file.
    pub(crate) fn advance(&mut self) -> Result<bool, TraceError> {
        if std::mem::take(&mut self.is_unread) {
            return Ok(true);
        }
        self.number += 1;
        self.line.clear();
        let mut limited = (&mut self.source).take(MAX_LINE as u64 + 1);
        let read = limited.read_line(&mut self.line);
        let read = read.map_err(|source| TraceError::Unreadable {
            file: self.file.clone(),
            line: self.number,
            source,
        })?;
        if read > MAX_LINE {
            let reason = format!("must be at most {MAX_LINE} bytes long");
            return Err(self.invalid(Fault::new("line", reason)));
        }
        Ok(read > 0)
    }

    /// The line, without its end.
    pub(crate) fn line(&self) -> &str {
        self.line.trim_end_matches(['\n', '\r'])
    }
}

/// A count of tokens, if any request can have that many.
pub(crate) fn check_tokens(field: &'static str, tokens: u64) -> Result<usize, Fault> {
    if tokens <= MAX_TOKENS {
        return Ok(tokens as usize);
    }
    let reason = format!("must be at most {MAX_TOKENS} tokens, not {tokens}");
    Err(Fault::new(field, reason))
}
