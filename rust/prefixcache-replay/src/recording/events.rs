//! The lines of a recording, part by part.

use std::path::{Path, PathBuf};
use std::time::Duration;

use prefixcache_core::EvictionPolicy;
use prefixcache_core::groups::GroupSpec;
use prefixcache_core::hints::Hint;
use prefixcache_core::store::FreeOrder;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::lines::{BytesRead, Fault, Lines, TraceError};

/// The version of the form that is read.
const VERSION: u64 = 1;

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

/// What a client said of a range of tokens: start, end, priority, seconds.
pub type RecordedHint = (usize, Option<usize>, u8, Option<f64>);

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
        hints: Vec<RecordedHint>,
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

impl Header {
    /// Reads the first line of a part.
    pub(crate) fn parse(line: &str) -> Result<Self, Fault> {
        if let Err(error) = serde_json::from_str::<IgnoredAny>(line) {
            let reason = format!("must be an object of JSON: {error}");
            return Err(Fault::new("header", reason));
        }
        // The version first: what else a line of another one has is not known.
        let Ok(Version { prefixcache_trace }) = serde_json::from_str(line) else {
            let reason = "is missing: this is no recording";
            return Err(Fault::new("prefixcache_trace", reason));
        };
        if prefixcache_trace != VERSION {
            let reason = format!("must be {VERSION}, not {prefixcache_trace}");
            return Err(Fault::new("prefixcache_trace", reason));
        }
        let header: Self = serde_json::from_str(line)
            .map_err(|error| Fault::new("header", format!("cannot be read: {error}")))?;
        match header.block_size {
            0 => Err(Fault::new("block_size", "must be at least 1")),
            _ => Ok(header),
        }
    }

    /// Fails unless a recording begins with this part.
    pub(crate) fn check_first(&self) -> Result<(), Fault> {
        if self.part == 0 {
            return Ok(());
        }
        let reason = format!(
            "must be 0: this is part {} of a recording, which is read from its first file on",
            self.part
        );
        Err(Fault::new("part", reason))
    }

    /// Fails unless this is the part after number `part` of a recording.
    pub(crate) fn check_follows(&self, recording: &str, part: u64) -> Result<(), Fault> {
        if (self.recording.as_str(), self.part) == (recording, part + 1) {
            return Ok(());
        }
        let reason = format!("must be {} of recording {recording}", part + 1);
        Err(Fault::new("part", reason))
    }
}

impl<'a> Line<'a> {
    /// Reads a line after the first.
    pub(crate) fn parse(line: &'a str) -> Result<Self, Fault> {
        serde_json::from_str(line)
            .map_err(|error| Fault::new("event", format!("cannot be read: {error}")))
    }
}

/// What a client said of a range of its tokens.
pub(crate) fn hint_of(&(start, end, priority, seconds): &RecordedHint) -> Result<Hint, Fault> {
    let ttl = seconds.map(Duration::try_from_secs_f64).transpose();
    let ttl = ttl.map_err(|_| Fault::new("hints", "must have TTLs that are numbers of seconds"))?;
    Ok(Hint {
        start,
        end,
        priority,
        ttl,
    })
}

/// The file of a part after the first, which stands at `path`.
pub(crate) fn part_path(path: &Path, part: u64) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{part}"));
    name.into()
}

/// The lines of a recording, the first part's first: whoever reads one part goes on with the next.
pub(super) struct Events {
    path: PathBuf,
    header: Header,
    lines: Lines,
    time: u64,
}

impl Events {
    /// Opens a recording at its first part.
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let (lines, header) = open_part(path, Header::check_first)?;
        Ok(Self {
            path: path.to_owned(),
            header,
            lines,
            time: 0,
        })
    }

    /// What the first part says of the cache.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// The file and line of what was read last.
    pub(super) fn place(&self) -> String {
        self.lines.place()
    }

    /// An error of the line that was read last.
    pub(super) fn invalid(&self, fault: Fault) -> TraceError {
        self.lines.invalid(fault)
    }

    /// The next line; none at the end. A line without its end, which a killed server leaves, is none.
    pub(super) fn read(&mut self) -> Result<Option<Line<'_>>, TraceError> {
        if !self.lines.advance()? || self.lines.is_cut() {
            return Ok(None);
        }
        let line = Line::parse(self.lines.line()).map_err(|fault| self.lines.invalid(fault))?;
        if line.t < self.time {
            let reason = format!("must not be below that of the line above, {}", self.time);
            return Err(self.lines.invalid(Fault::new("t", reason)));
        }
        self.time = line.t;
        Ok(Some(line))
    }

    /// Goes on with the next part, after a line that says there is one.
    pub(super) fn open_next(&mut self) -> Result<(), TraceError> {
        let part = self.header.part;
        let path = part_path(&self.path, part + 1);
        let follows = |next: &Header| next.check_follows(&self.header.recording, part);
        self.lines = open_part(&path, follows)?.0;
        self.header.part = part + 1;
        Ok(())
    }
}

/// The lines of a part behind its first, which has to pass a check.
fn open_part(
    path: &Path,
    check: impl FnOnce(&Header) -> Result<(), Fault>,
) -> Result<(Lines, Header), TraceError> {
    let mut lines = Lines::open(path, &BytesRead::default())?;
    if !lines.advance()? || lines.is_cut() {
        let reason = "is missing: the file has no whole line";
        return Err(lines.invalid(Fault::new("header", reason)));
    }
    let header = Header::parse(lines.line());
    let header = header.and_then(|header| check(&header).map(|()| header));
    match header {
        Ok(header) => Ok((lines, header)),
        Err(fault) => Err(lines.invalid(fault)),
    }
}
