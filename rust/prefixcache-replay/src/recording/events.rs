//! The lines of a recording, part by part.

use std::path::{Path, PathBuf};
use std::time::Duration;

use prefixcache_core::EvictionPolicy;
use prefixcache_core::groups::GroupSpec;
use prefixcache_core::hints::Hint;
use prefixcache_core::store::FreeOrder;
use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Deserializer};

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
    #[serde(deserialize_with = "groups")]
    pub groups: Vec<GroupSpec>,
    /// Which free block goes first.
    #[serde(with = "PolicyWord")]
    pub eviction_policy: EvictionPolicy,
    /// Where blocks without content go.
    #[serde(with = "OrderWord")]
    pub free_order: FreeOrder,
    /// The share of the pool that the hints of one owner may raise.
    pub retention_budget: f64,
    /// Whether a published block is given up for one that holds its content already.
    #[serde(alias = "merge_twins")]
    pub merge_duplicates: bool,
    /// What stays behind windows; none without windows.
    pub retention: Option<Windows>,
}

/// What stays behind windows.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Windows {
    /// Tokens between two anchors, 0 for none; nothing: every block stays.
    pub interval: Option<usize>,
    /// Whether anchors are pinned.
    pub pin: bool,
    /// An anchor fewer blocks than this past the one before is not pinned.
    pub min_pin_blocks: usize,
    /// Whether full attention's blocks are pinned too.
    pub pin_prefix: bool,
}

fn groups<'de, D: Deserializer<'de>>(found: D) -> Result<Vec<GroupSpec>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Named {
        Whole(String),
        Window(String, usize),
    }
    let named = Vec::<Named>::deserialize(found)?;
    let specs = named.into_iter().map(|group| match group {
        Named::Whole(name) if name == "full" => Ok(GroupSpec::FullAttention),
        Named::Whole(name) if name == "state" => Ok(GroupSpec::State),
        Named::Window(name, window) if name == "sliding_window" => {
            Ok(GroupSpec::SlidingWindow { window })
        }
        _ => Err(D::Error::custom(
            "a group must be \"full\", \"state\" or [\"sliding_window\", tokens]",
        )),
    });
    specs.collect()
}

#[derive(Deserialize)]
#[serde(remote = "EvictionPolicy", rename_all = "kebab-case")]
enum PolicyWord {
    Lru,
    ReuseQueue,
}

#[derive(Deserialize)]
#[serde(remote = "FreeOrder", rename_all = "snake_case")]
enum OrderWord {
    UnhashedFirst,
    Append,
}

/// What the live server counted at a point, or a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Counters {
    /// Tokens of the requests that started.
    pub queries: u64,
    /// Those of them that were in the cache.
    pub hits: u64,
    /// Blocks whose content was evicted.
    pub evictions: u64,
    /// Blocks allocated without their content.
    pub allocations: u64,
    /// Blocks taken with their content.
    pub touches: u64,
    /// Blocks that were pinned, each time again.
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

/// What happened. docs/reference/recording.md has the fields with their units.
#[derive(Debug, Deserialize)]
#[serde(tag = "e", rename_all = "lowercase")]
pub enum Event<'a> {
    Add(#[serde(borrow)] Added<'a>),
    Start(#[serde(borrow)] Started<'a>),
    Slots {
        ids: Vec<u64>,
        upto: Vec<usize>,
    },
    Snapshots {
        ids: Vec<u64>,
        from: Vec<usize>,
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

/// A request joins the queue.
#[derive(Debug, Deserialize)]
pub struct Added<'a> {
    pub id: u64,
    pub tokens: usize,
    #[serde(default)]
    pub names: &'a str,
    #[serde(default)]
    pub hints: Vec<RecordedHint>,
    #[serde(default)]
    pub owner: String,
    #[serde(default = "yes")]
    pub hashed: bool,
    #[serde(default = "yes")]
    pub write: bool,
    pub write_upto: Option<usize>,
}

/// A request takes its blocks.
#[derive(Debug, Deserialize)]
pub struct Started<'a> {
    pub id: u64,
    pub tokens: usize,
    #[serde(default)]
    pub names: &'a str,
    pub hit: usize,
    pub new: usize,
    pub chunk: Option<usize>,
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

    /// Fails unless this is part `number` of a recording, by its name where that is known.
    fn check_part(&self, recording: Option<&str>, number: u64) -> Result<(), Fault> {
        if self.part == number && recording.is_none_or(|name| name == self.recording) {
            return Ok(());
        }
        let reason = match recording {
            Some(name) => format!("must be {number} of recording {name}"),
            None => format!(
                "must be 0: this is part {} of a recording, which is read from its first file on",
                self.part
            ),
        };
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
    Ok(Hint { start, end, priority, ttl })
}

/// The lines of a recording, the first part's first: whoever reads one part goes on with the next.
pub(crate) struct Events {
    /// The first part.
    path: PathBuf,
    bytes: BytesRead,
    header: Header,
    lines: Lines,
    time: u64,
}

impl Events {
    /// Opens a recording at its first part.
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let bytes = BytesRead::default();
        let lines = open_part(path, &bytes)?;
        Self::begin(path, lines, bytes)
    }

    /// Begins with lines of which the first has been read, and whose file reads are counted in `bytes`.
    pub(crate) fn begin(path: &Path, lines: Lines, bytes: BytesRead) -> Result<Self, TraceError> {
        let header = read_header(&lines, None, 0)?;
        Ok(Self { path: path.to_owned(), bytes, header, lines, time: 0 })
    }

    /// What the first line of the part says of the cache.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The file and line of what was read last.
    pub(super) fn place(&self) -> String {
        self.lines.place()
    }

    /// An error of the line that was read last.
    pub(crate) fn invalid(&self, fault: Fault) -> TraceError {
        self.lines.invalid(fault)
    }

    /// The next line; none at the end. A line without its end, which a killed server leaves, is none.
    pub(crate) fn read(&mut self) -> Result<Option<Line<'_>>, TraceError> {
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
    pub(crate) fn open_next(&mut self) -> Result<(), TraceError> {
        let part = self.header.part + 1;
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{part}"));
        self.lines = open_part(Path::new(&name), &self.bytes)?;
        self.header = read_header(&self.lines, Some(&self.header.recording), part)?;
        Ok(())
    }
}

/// The lines of a file, at its first one.
fn open_part(path: &Path, bytes: &BytesRead) -> Result<Lines, TraceError> {
    let mut lines = Lines::open(path, bytes)?;
    if lines.advance()? && !lines.is_cut() {
        return Ok(lines);
    }
    let reason = "is missing: the file has no whole line";
    Err(lines.invalid(Fault::new("header", reason)))
}

/// The first line of a part, which is that of this recording and number.
fn read_header(lines: &Lines, recording: Option<&str>, part: u64) -> Result<Header, TraceError> {
    let header = Header::parse(lines.line());
    let checked = header.and_then(|header| header.check_part(recording, part).map(|()| header));
    checked.map_err(|fault| lines.invalid(fault))
}
