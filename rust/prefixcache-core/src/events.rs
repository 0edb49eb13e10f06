//! What can be found in the cache, reported to one reader in the order in which it changed.
//!
//! Nothing of this exists until somebody asks for it ([`keep_events`](crate::BlockStore::keep_events)). Then
//! the single writer sends what it registers and what loses its last copy through a queue, a message a batch, and
//! waits for nobody. The reader applies them to a `Replica` of the index, which knows what can be found and with
//! which tokens. What the replica knows already, or never knew, is not reported: blocks of a scope are never sent,
//! so their evictions end there.
//!
//! What was sent and not received is bounded by whoever calls [`EventReader::receive`] when
//! [`EventLog::num_pending`] is high, the writer if need be, some blocks at a time; such a call takes time in
//! proportion to those blocks, whatever the reader has missed. What was received and not taken is bounded by
//! [`MAX_UNREAD`] blocks: beyond, the reader drops it and reports everything again after a [`Change::Cleared`], from
//! a copy of the replica that is made when somebody takes it. So whoever takes late still ends with what there is.

mod replica;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;

use crossbeam_queue::SegQueue;

use crate::id::{BlockHash, BlockKey, GroupId};
use crate::sync::{Arc, AtomicU64, Ordering::Relaxed};

pub use replica::Snapshot;

use replica::Replica;

/// Blocks of changes that wait to be taken; with more than these, everything is reported again.
pub const MAX_UNREAD: usize = 1 << 16;

/// Changes that are dropped, of those that nobody took in time, with each message that is received.
const DROPPED_AT_ONCE: usize = 2;

/// The last 8 bytes of a block's hash, big endian: what other programs know a block by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortHash(pub u64);

impl From<&BlockHash> for ShortHash {
    fn from(hash: &BlockHash) -> Self {
        Self(hash.short())
    }
}

/// The tokens of a block, and the block before it in its prompt; None at the prompt's beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTokens<'a> {
    /// The block before.
    pub parent: Option<ShortHash>,
    /// As many as a block has.
    pub tokens: Cow<'a, [u32]>,
}

/// Blocks of one group, each the one after the block before it in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The group that the blocks belong to.
    pub group: GroupId,
    /// The block before the first; None at a prompt's beginning.
    pub parent: Option<ShortHash>,
    /// The blocks.
    pub hashes: Vec<ShortHash>,
    /// The tokens of all of them.
    pub tokens: Vec<u32>,
}

/// A change of what can be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// These blocks can be found from now on.
    Stored(Run),
    /// These blocks of the group can be found no more.
    Removed(GroupId, Vec<ShortHash>),
    /// Nothing can be found any more.
    Cleared,
}

impl Change {
    /// How many blocks it is about; what is about none counts as one.
    fn weight(&self) -> usize {
        match self {
            Self::Stored(run) => run.hashes.len(),
            Self::Removed(_, hashes) => hashes.len(),
            Self::Cleared => 1,
        }
    }
}

/// A block's name, and the group that it belongs to.
pub(crate) type Name = (ShortHash, GroupId);

/// What the writer sends.
enum Sent {
    Stored(Run),
    Removed(Vec<Name>),
    Cleared,
}

impl Sent {
    /// As [`Change::weight`].
    fn weight(&self) -> u64 {
        match self {
            Self::Stored(run) => run.hashes.len() as u64,
            Self::Removed(names) => names.len() as u64,
            Self::Cleared => 1,
        }
    }
}

/// The writer's end.
#[derive(Debug)]
pub struct EventLog {
    sent: Arc<SegQueue<Sent>>,
    /// Blocks that were sent and not received.
    pending: Arc<AtomicU64>,
}

impl EventLog {
    /// Both ends, for a cache of blocks of `block_size` tokens that has these already. The reader takes them first,
    /// each behind its parent.
    pub(crate) fn new(
        block_size: usize,
        restored: Vec<(BlockKey, BlockTokens<'_>)>,
    ) -> (Self, EventReader) {
        let sent = Arc::new(SegQueue::new());
        let pending = Arc::new(AtomicU64::new(0));
        let mut replica = Replica::new(block_size);
        for (key, block) in restored {
            replica.insert(((&key.hash).into(), key.group), block.parent, &block.tokens);
        }
        let reader = EventReader {
            sent: Arc::clone(&sent),
            pending: Arc::clone(&pending),
            resync: (!replica.is_empty()).then(|| replica.clone().into_snapshot()),
            replica,
            unread: VecDeque::new(),
            num_unread: 0,
            is_resync_due: false,
        };
        (Self { sent, pending }, reader)
    }

    /// Blocks that were sent and not received.
    #[must_use]
    pub fn num_pending(&self) -> usize {
        // Relaxed: the queue orders what is sent; this says when to receive.
        self.pending.load(Relaxed) as usize
    }

    /// The blocks of this range of a prompt can be found from now on.
    pub(crate) fn stored(
        &self,
        group: GroupId,
        blocks: Range<usize>,
        hashes: &[BlockHash],
        tokens: &[u32],
        block_size: usize,
    ) {
        let parent = blocks.start.checked_sub(1);
        self.send(Sent::Stored(Run {
            group,
            parent: parent.map(|parent| (&hashes[parent]).into()),
            hashes: hashes[blocks.clone()].iter().map(ShortHash::from).collect(),
            tokens: tokens[blocks.start * block_size..blocks.end * block_size].to_vec(),
        }));
    }

    /// The last copies of these are evicted.
    pub(crate) fn removed(&self, names: Vec<Name>) {
        if !names.is_empty() {
            self.send(Sent::Removed(names));
        }
    }

    /// Everything is evicted.
    pub(crate) fn cleared(&self) {
        self.send(Sent::Cleared);
    }

    fn send(&self, sent: Sent) {
        // Relaxed: as in `num_pending`. Before the message, so that the count is never below 0.
        self.pending.fetch_add(sent.weight(), Relaxed);
        self.sent.push(sent);
    }
}

/// The reader's end, for one thread at a time.
#[derive(Debug)]
pub struct EventReader {
    sent: Arc<SegQueue<Sent>>,
    pending: Arc<AtomicU64>,
    replica: Replica,
    /// What was received and not taken; where a resync is due, what is left to drop of it.
    unread: VecDeque<Change>,
    /// Their blocks.
    num_unread: usize,
    /// Whether everything is to be reported again, before what is unread: whoever takes next makes the copy.
    is_resync_due: bool,
    /// The rest of such a copy.
    resync: Option<Snapshot>,
}

impl EventReader {
    /// Receives what was sent, until that is about `most` blocks.
    pub fn receive(&mut self, most: usize) {
        let mut weight = 0;
        while weight < most as u64
            && let Some(sent) = self.sent.pop()
        {
            weight += sent.weight();
            self.apply(sent);
        }
    }

    fn apply(&mut self, sent: Sent) {
        // Relaxed: as in `EventLog::num_pending`.
        self.pending.fetch_sub(sent.weight(), Relaxed);
        self.replica.apply(sent, |change| {
            if !self.is_resync_due {
                self.num_unread += change.weight();
                self.unread.push_back(change);
            }
        });
        self.is_resync_due |= self.num_unread > MAX_UNREAD;
        if self.is_resync_due {
            // A few at a time: the caller may be the writer.
            self.unread.truncate(self.unread.len().saturating_sub(DROPPED_AT_ONCE));
        }
    }

    /// Receives, and takes the oldest changes, until they are about `most` blocks or there are no more.
    pub fn take(&mut self, most: usize) -> Vec<Change> {
        self.receive(usize::MAX);
        let mut taken = Vec::new();
        let mut weight = 0;
        while weight < most
            && let Some(change) = self.next()
        {
            weight += change.weight();
            taken.push(change);
        }
        taken
    }

    fn next(&mut self) -> Option<Change> {
        if std::mem::take(&mut self.is_resync_due) {
            self.unread = VecDeque::new();
            self.num_unread = 0;
            self.resync = Some(self.replica.clone().into_snapshot());
            return Some(Change::Cleared);
        }
        if let Some(run) = self.resync.as_mut().and_then(Snapshot::next) {
            return Some(Change::Stored(run));
        }
        self.resync = None;
        let change = self.unread.pop_front()?;
        self.num_unread -= change.weight();
        Some(change)
    }

    /// What all changes taken so far have led to; None while there are more that were received and not taken.
    #[must_use]
    pub fn snapshot(&self) -> Option<Snapshot> {
        let is_level = !self.is_resync_due && self.resync.is_none() && self.unread.is_empty();
        is_level.then(|| self.replica.clone().into_snapshot())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(first: u64, count: u64) -> Vec<BlockHash> {
        let hash = |number: u64| {
            let mut bytes = [0; 32];
            bytes[24..].copy_from_slice(&number.to_be_bytes());
            BlockHash::from_bytes(bytes)
        };
        (first..first + count).map(hash).collect()
    }

    #[test]
    fn a_late_readers_writer_receives_some_and_copies_nothing() {
        let (event_log, mut reader) = EventLog::new(1, Vec::new());
        let total = 2 * MAX_UNREAD as u64;
        for first in (0..total).step_by(64) {
            let tokens = vec![first as u32; 64];
            event_log.stored(GroupId::new(0), 0..64, &hashes(first, 64), &tokens, 1);
        }
        reader.receive(1000);
        assert_eq!(event_log.num_pending() as u64, total - 1024);
        reader.receive(usize::MAX);
        assert!(reader.is_resync_due && reader.resync.is_none());
        assert_eq!(reader.take(1), [Change::Cleared]);
        assert!(reader.resync.is_some() && reader.unread.is_empty());
    }

    /// Neither what nobody took nor a copy that somebody has begun to take is dropped within one message's time.
    #[test]
    fn what_is_out_of_date_is_dropped_a_few_changes_a_message() {
        let (event_log, mut reader) = EventLog::new(1, Vec::new());
        let send = |count: u64| {
            for first in 0..count {
                event_log.stored(GroupId::new(0), 0..1, &hashes(first, 1), &[0], 1);
                event_log.removed(vec![((&hashes(first, 1)[0]).into(), GroupId::new(0))]);
            }
        };
        send(10);
        reader.take(1);
        reader.is_resync_due = true;
        assert_eq!(reader.take(1), [Change::Cleared]);
        send(MAX_UNREAD as u64);
        reader.receive(MAX_UNREAD + 1);
        assert!(reader.is_resync_due && reader.resync.is_some());
        let left = reader.unread.len();
        reader.receive(10);
        assert_eq!(reader.unread.len(), left - 10 * DROPPED_AT_ONCE);
        assert_eq!(reader.take(usize::MAX), [Change::Cleared]);
    }
}
