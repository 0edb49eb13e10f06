//! The lines of a recording, part by part.

use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};

use prefixcache_core::EvictionPolicy;
use prefixcache_core::groups::GroupSpec;
use prefixcache_core::store::FreeOrder;
use serde::Deserialize;
use serde::de::IgnoredAny;
use thiserror::Error;

use crate::trace::open;

/// The version of the form that is read.
const VERSION: u64 = 1;

/// The most bytes of a line: more is taken for an error in the file.
const MAX_LINE: u64 = 1 << 28;

/// What is wrong with a recording.
#[derive(Debug, Error)]
pub enum RecordingError {
    /// A part cannot be read.
    #[error("{place}: {source}")]
    Unreadable {
        /// Where.
        place: Place,
        /// Why.
        source: io::Error,
    },
    /// A line is not what the form asks for.
    #[error("{place}: {reason}")]
    Invalid {
        /// Where.
        place: Place,
        /// What is wrong, beginning with the name of the field.
        reason: String,
    },
}

/// A line of a part.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}, line {line}")]
pub struct Place {
    /// The part's file.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
}

impl Place {
    pub(super) fn invalid(&self, reason: impl Into<String>) -> RecordingError {
        RecordingError::Invalid {
            place: self.clone(),
            reason: reason.into(),
        }
    }
}

/// The first line of a part.
#[derive(Clone, Debug, Deserialize)]
pub struct Header {
    /// The version of the form.
    pub prefixcache_trace: u64,
    /// What the parts of a recording have in common.
    pub recording: String,
    /// The part's number, from 0.
    pub part: u64,
    /// Tokens in a block.
    pub block_size: usize,
    /// The pool at the start, the null block counted.
    pub num_blocks: usize,
    /// The most blocks that it may be resized to.
    pub max_blocks: usize,
    /// The most free blocks that keep their content; none: all.
    pub max_cached_blocks: Option<usize>,
    /// What each group of layers attends to.
    pub groups: Vec<Group>,
    /// Which free block goes first.
    pub eviction_policy: Policy,
    /// Where blocks without content go.
    pub free_order: Order,
    /// The share of the pool that the hints of one owner may raise.
    pub retention_budget: f64,
    /// Whether a published block is given up for one that holds its content already.
    pub merge_twins: bool,
    /// What stays behind windows; none without windows.
    pub retention: Option<Windows>,
}

/// A group of layers, as a header names it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Group {
    /// `"full"`.
    Whole(WholeGroup),
    /// `["sliding_window", tokens]`.
    Window(WindowGroup, usize),
}

/// The name of a group of full attention.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WholeGroup {
    /// All blocks are needed.
    Full,
}

/// The name of a group with a window.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowGroup {
    /// The last tokens are needed.
    SlidingWindow,
}

impl Group {
    pub(super) fn spec(&self) -> GroupSpec {
        match *self {
            Self::Whole(_) => GroupSpec::FullAttention,
            Self::Window(_, window) => GroupSpec::SlidingWindow { window },
        }
    }
}

/// An eviction policy, as a header names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The block that was not used for the longest time.
    Lru,
    /// The block with the fewest hits to be expected.
    ReuseQueue,
}

impl From<Policy> for EvictionPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Lru => Self::Lru,
            Policy::ReuseQueue => Self::ReuseQueue,
        }
    }
}

/// A free order, as a header names it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// To the front.
    UnhashedFirst,
    /// To the end.
    Append,
}

impl From<Order> for FreeOrder {
    fn from(order: Order) -> Self {
        match order {
            Order::UnhashedFirst => Self::UnhashedFirst,
            Order::Append => Self::Append,
        }
    }
}

/// What stays behind windows.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Windows {
    /// Tokens between two anchors, 0 for none; nothing: every block stays.
    pub interval: Option<usize>,
    /// Whether anchors are pinned.
    pub pin: bool,
    /// An anchor fewer than so many blocks past the one before is not pinned.
    pub min_pin_blocks: usize,
    /// Whether full attention's blocks are pinned too.
    pub pin_prefix: bool,
}

/// What the live server counted at a point, or a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Counters {
    /// Tokens of the requests that started.
    pub queries: u64,
    /// Those of them that were in the cache.
    pub hits: u64,
    /// Blocks whose content was lost.
    pub evictions: u64,
    /// Blocks handed out without their content.
    pub allocations: u64,
    /// Blocks taken with their content.
    pub touches: u64,
    /// Blocks that were pinned, each time anew.
    pub pins: u64,
    /// Pins that ended for younger ones.
    pub demotions: u64,
    /// Blocks whose content was moved when the pool shrank.
    pub moved: u64,
    /// Blocks whose content a shrink cost.
    pub lost_to_resize: u64,
    /// Blocks that can be hit now.
    pub cached: u64,
    /// Blocks that requests hold now.
    pub in_use: u64,
}

impl Counters {
    /// Each count with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 11] {
        [
            ("queries", self.queries),
            ("hits", self.hits),
            ("evictions", self.evictions),
            ("allocations", self.allocations),
            ("touches", self.touches),
            ("pins", self.pins),
            ("demotions", self.demotions),
            ("moved", self.moved),
            ("lost_to_resize", self.lost_to_resize),
            ("cached", self.cached),
            ("in_use", self.in_use),
        ]
    }
}

/// A line after the first: what happened, and when.
#[derive(Debug, Deserialize)]
pub struct Line<'a> {
    /// Milliseconds from the start of the recording.
    pub t: u64,
    /// What happened.
    #[serde(flatten, borrow)]
    pub event: Event<'a>,
}

/// What happened. The fields are those of docs/recording.md.
#[derive(Debug, Deserialize)]
#[serde(tag = "e", rename_all = "lowercase")]
#[expect(
    missing_docs,
    reason = "docs/recording.md has them all, with their units"
)]
pub enum Event<'a> {
    Add {
        id: u64,
        tokens: usize,
        #[serde(default)]
        names: &'a str,
        #[serde(default)]
        hints: Vec<(usize, Option<usize>, u8, Option<f64>)>,
        #[serde(default)]
        owner: String,
        #[serde(default = "yes")]
        hashed: bool,
        #[serde(default = "yes")]
        write: bool,
        write_upto: Option<usize>,
    },
    Start {
        id: u64,
        tokens: usize,
        #[serde(default)]
        names: &'a str,
        hit: usize,
        new: usize,
        chunk: Option<usize>,
    },
    Slots {
        ids: Vec<u64>,
        upto: Vec<usize>,
    },
    Publish {
        ids: Vec<u64>,
        upto: Vec<usize>,
        #[serde(borrow)]
        names: Vec<&'a str>,
    },
    Anchor {
        id: u64,
        at: usize,
    },
    Drop {
        ids: Vec<u64>,
        upto: Vec<usize>,
    },
    Preempt {
        ids: Vec<u64>,
    },
    Restart {
        id: u64,
    },
    End {
        ids: Vec<u64>,
        tokens: Vec<usize>,
        well: Vec<bool>,
    },
    Demote {
        count: usize,
    },
    Expire {},
    Reset {},
    Weights {},
    Move {
        blocks: usize,
        most: usize,
        moved: bool,
    },
    Resize {
        blocks: usize,
    },
    Counters(Counters),
    Stop {
        reason: String,
    },
    Next {},
}

fn yes() -> bool {
    true
}

/// The first line of any file that calls itself a recording.
#[derive(Deserialize)]
struct Version {
    prefixcache_trace: u64,
}

/// The lines of a recording, the first part's first: whoever reads one part goes on with the next.
pub struct Events {
    path: PathBuf,
    header: Header,
    source: Box<dyn BufRead + Send>,
    place: Place,
    bytes: Vec<u8>,
    time: u64,
}

impl Events {
    /// Opens a recording at its first part.
    pub fn open(path: &Path) -> Result<Self, RecordingError> {
        let mut place = start_of(path);
        let unreadable = |source, place: &Place| RecordingError::Unreadable {
            place: place.clone(),
            source,
        };
        let mut source = open(path).map_err(|error| unreadable(error, &place))?;
        let mut bytes = Vec::new();
        let header = read_header(&mut source, &mut bytes, &mut place)?;
        if header.part != 0 {
            let reason = format!(
                "part must be 0: this is part {} of a recording, which is read from its first file on",
                header.part
            );
            return Err(place.invalid(reason));
        }
        Ok(Self {
            path: path.to_owned(),
            header,
            source,
            place,
            bytes,
            time: 0,
        })
    }

    /// What the first part says of the cache.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The line that was read last.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The next line; none at the end. A line without its end, which a killed server leaves, is none.
    pub fn read(&mut self) -> Result<Option<Line<'_>>, RecordingError> {
        if !read_line(&mut self.source, &mut self.bytes, &mut self.place)? {
            return Ok(None);
        }
        let line: Line = serde_json::from_str(text(&self.bytes, &self.place)?)
            .map_err(|error| self.place.invalid(format!("event cannot be read: {error}")))?;
        if line.t < self.time {
            let reason = format!("t must not be below that of the line above, {}", self.time);
            return Err(self.place.invalid(reason));
        }
        self.time = line.t;
        Ok(Some(line))
    }

    /// Goes on with the next part, after a line that says there is one.
    pub fn open_next(&mut self) -> Result<(), RecordingError> {
        let part = self.header.part + 1;
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{part}"));
        let path = PathBuf::from(name);
        let mut place = start_of(&path);
        self.source = open(&path).map_err(|source| RecordingError::Unreadable {
            place: place.clone(),
            source,
        })?;
        let header = read_header(&mut self.source, &mut self.bytes, &mut place)?;
        if (&header.recording, header.part) != (&self.header.recording, part) {
            let reason = format!("part must be {part} of recording {}", self.header.recording);
            return Err(place.invalid(reason));
        }
        self.header.part = part;
        self.place = place;
        Ok(())
    }
}

fn start_of(path: &Path) -> Place {
    Place {
        file: path.display().to_string(),
        line: 0,
    }
}

/// Reads a line with its end; false where there is none.
fn read_line(
    source: &mut impl BufRead,
    bytes: &mut Vec<u8>,
    place: &mut Place,
) -> Result<bool, RecordingError> {
    bytes.clear();
    place.line += 1;
    let read = (&mut *source).take(MAX_LINE).read_until(b'\n', bytes);
    let read = read.map_err(|source| RecordingError::Unreadable {
        place: place.clone(),
        source,
    })?;
    if read as u64 == MAX_LINE {
        return Err(place.invalid(format!("line must be shorter than {MAX_LINE} bytes")));
    }
    Ok(bytes.ends_with(b"\n"))
}

fn text<'a>(bytes: &'a [u8], place: &Place) -> Result<&'a str, RecordingError> {
    std::str::from_utf8(bytes).map_err(|_| place.invalid("line must be UTF-8"))
}

fn read_header(
    source: &mut impl BufRead,
    bytes: &mut Vec<u8>,
    place: &mut Place,
) -> Result<Header, RecordingError> {
    if !read_line(source, bytes, place)? {
        return Err(place.invalid("header is missing: the file has no whole line"));
    }
    let line = text(bytes, place)?;
    if let Err(error) = serde_json::from_str::<IgnoredAny>(line) {
        return Err(place.invalid(format!("header must be an object of JSON: {error}")));
    }
    let Ok(Version { prefixcache_trace }) = serde_json::from_str(line) else {
        return Err(place.invalid("prefixcache_trace is missing: this is no recording"));
    };
    if prefixcache_trace != VERSION {
        let reason = format!("prefixcache_trace must be {VERSION}, not {prefixcache_trace}");
        return Err(place.invalid(reason));
    }
    serde_json::from_str(line)
        .map_err(|error| place.invalid(format!("header cannot be read: {error}")))
}
