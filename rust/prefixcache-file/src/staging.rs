//! The bytes of evicted blocks, on their way to a slower tier and back.
//!
//! The pool's writer copies a block into a bounded queue before its bytes change; another thread takes it out. So that
//! a burst of evictions finds room there, that thread also copies blocks before they are evicted: once the pool
//! holds more than the queue could. Which blocks the tier holds is known here, so that none is copied twice and
//! hits are counted without I/O.

use std::any::Any;
use std::collections::{HashSet, VecDeque};
use std::hash::Hasher;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, LockResult, Mutex, MutexGuard};
use std::thread;

use prefixcache_core::backing::BackingStore;
use prefixcache_core::band::Band;
use prefixcache_core::events::BlockTokens;
use prefixcache_core::id::{BlockHash, BlockId, BlockKey, GroupId};
use twox_hash::XxHash3_64;

/// Bytes of a checksum, which end a block's bytes.
const SUM_BYTES: usize = 8;

/// Evicted blocks whose keys are remembered, for each block of the pool.
const SEEN_PER_BLOCK: usize = 4;

/// The KV tensors of a pool: where each begins, and what a block takes of it.
#[derive(Debug)]
pub struct Memory {
    /// The first byte of each tensor.
    pub tensors: Vec<NonNull<u8>>,
    /// Bytes of a block in one tensor.
    pub block_bytes: usize,
    /// Blocks of each tensor.
    pub num_blocks: usize,
    /// What keeps the tensors there.
    pub owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: plain addresses and what may be sent itself; `Staging::new` says who may read and write what is there.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Bytes of a block with its checksum.
    #[must_use]
    pub fn value_bytes(&self) -> usize {
        self.tensors.len() * self.block_bytes + SUM_BYTES
    }

    fn places(&self, block: BlockId) -> impl Iterator<Item = NonNull<u8>> {
        assert!(block.index() < self.num_blocks, "no such block: {block}");
        // SAFETY: the block is one of the tensor's, so the offset stays inside.
        let place =
            move |start: &NonNull<u8>| unsafe { start.add(block.index() * self.block_bytes) };
        self.tensors.iter().map(place)
    }
}

/// What is known of the content of a block of the pool.
#[derive(Clone, Copy, Debug)]
struct Content {
    key: BlockKey,
    era: u64,
    /// Of content of another process: the sum that its bytes should have, which a copy is compared with.
    sum: Option<u64>,
    uses: u32,
    band: Band,
    pinned: bool,
    unneeded: bool,
    /// Whether KV events report it.
    is_open: bool,
}

impl Content {
    fn new(key: BlockKey, era: u64, uses: u32) -> Self {
        Self {
            key,
            era,
            sum: None,
            uses,
            band: Band::DEFAULT,
            pinned: false,
            unneeded: false,
            is_open: false,
        }
    }

    /// Whether it may come back: it was used often enough, or somebody wants it kept.
    fn is_worth(&self, min_uses: u32) -> bool {
        let used = (self.uses >= min_uses && !self.unneeded) || self.band > Band::DEFAULT;
        self.pinned || (used && self.band >= Band::DEFAULT)
    }
}

/// The bytes of a block on their way to the tier.
type Copied = (Content, Vec<u8>);

/// Lifetime counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingCounts {
    /// Blocks that were copied.
    pub staged: u64,
    /// Blocks that were worth it and are not written, for want of room in the queue.
    pub dropped: u64,
    /// Blocks that were evicted and not worth it.
    pub skipped: u64,
    /// Blocks that came from the tier, or that another process left, with other bytes than were written.
    pub damaged: u64,
}

#[derive(Debug, Default)]
struct State {
    contents: Vec<Option<Content>>,
    /// How many of them are of this era.
    num_found: usize,
    num_blocks: usize,
    queue: VecDeque<Copied>,
    /// Blocks to be copied before they are evicted, in the order in which they were given back, each once.
    ahead: VecDeque<BlockId>,
    is_ahead: Vec<bool>,
    /// The one of them whose bytes are being read without the lock.
    copying: Option<BlockId>,
    /// Keys of copies that the tier does not hold yet.
    waiting: HashSet<BlockKey>,
    stored: HashSet<BlockKey>,
    /// Keys that KV events may report, of blocks that are in the queue or stored, or were.
    open: HashSet<BlockKey>,
    /// Those of which it is to be reported whether the tier holds them.
    changed: HashSet<BlockKey>,
    /// Keys that were evicted and not copied, the younger half first.
    seen: [HashSet<u64>; 2],
    is_durable: bool,
    /// A call has panicked, on whatever thread: what it left may be half done, so nothing is copied or found any more.
    is_closed: bool,
    era: u64,
    counts: StagingCounts,
}

impl State {
    /// Of a pool of at most `num_blocks`.
    fn new(num_blocks: usize) -> Self {
        let (contents, is_ahead) = (vec![None; num_blocks], vec![false; num_blocks]);
        Self { contents, num_blocks, is_ahead, ..Self::default() }
    }

    fn close(&mut self) {
        if !self.is_closed {
            let (era, counts) = (self.era, self.counts);
            *self = Self { era, counts, is_closed: true, ..Self::new(self.contents.len()) };
        }
    }

    fn was_seen(&self, key: &BlockKey) -> bool {
        self.seen.iter().any(|keys| keys.contains(&short(key)))
    }

    fn put(&mut self, block: BlockId, content: Option<Content>) -> Option<Content> {
        let before = std::mem::replace(&mut self.contents[block.index()], content);
        let count = |one: Option<Content>| usize::from(one.is_some_and(|one| one.era == self.era));
        self.num_found = self.num_found + count(content) - count(before);
        before
    }

    /// The content of a block, if it is to be copied.
    fn wanted(&self, block: BlockId, min_uses: u32) -> Option<Content> {
        let content = self.contents[block.index()].filter(|one| one.era == self.era)?;
        let is_wanted = content.is_worth(min_uses) && !self.is_copied(&content.key);
        is_wanted.then_some(content)
    }

    fn is_copied(&self, key: &BlockKey) -> bool {
        self.stored.contains(key) || self.waiting.contains(key)
    }

    fn put_ahead(&mut self, block: BlockId, min_uses: u32) {
        if !self.is_ahead[block.index()] && self.wanted(block, min_uses).is_some() {
            self.is_ahead[block.index()] = true;
            self.ahead.push_back(block);
        }
    }

    /// Whether there are blocks to copy ahead, and a burst could evict more than the queue has room for: one that the
    /// pool has no free blocks for. What requests use now counts, since they give all of it back at once.
    fn is_due(&self, capacity: usize) -> bool {
        let free = self.num_blocks.saturating_sub(self.num_found);
        !self.ahead.is_empty() && self.num_found > capacity.max(free)
    }

    fn note_copy(&mut self, content: &Content) {
        self.counts.staged += 1;
        self.waiting.insert(content.key);
        if content.is_open {
            self.open.insert(content.key);
        }
    }

    fn add_stored(&mut self, key: BlockKey) {
        self.waiting.remove(&key);
        if self.stored.insert(key) && self.open.contains(&key) {
            self.changed.insert(key);
        }
    }

    fn remove_stored(&mut self, key: &BlockKey) {
        self.stored.remove(key);
        if self.open.remove(key) {
            self.changed.insert(*key);
        }
    }

    /// The buffer of a block that goes into the queue; None where it has no room for any.
    ///
    /// When it is full, the oldest block leaves it: of a prompt the end is evicted first, which without its
    /// beginning is of no use.
    fn room(&mut self, capacity: usize) -> Option<Vec<u8>> {
        if self.queue.len() < capacity {
            return Some(Vec::new());
        }
        self.counts.dropped += 1;
        let (content, bytes) = self.queue.pop_front()?;
        self.waiting.remove(&content.key);
        Some(bytes)
    }

    fn remember(&mut self, key: &BlockKey, most: usize) {
        if self.seen[0].len() >= most {
            self.seen.swap(0, 1);
            self.seen[0].clear();
        }
        self.seen[0].insert(short(key));
    }
}

/// Of two keys seldom the same.
fn short(key: &BlockKey) -> u64 {
    key.hash.short().wrapping_add(u64::from(key.group.get()))
}

#[derive(Debug)]
struct Shared {
    memory: Memory,
    /// Blocks that the queue has room for.
    capacity: usize,
    min_uses: u32,
    state: Mutex<State>,
    /// A copy is complete that was made without the lock.
    copied: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        closed_if_poisoned(self.state.lock())
    }

    /// The state, once no thread reads blocks without the lock of which `changes` says that their bytes may change.
    /// That is a wait for the copy of one block, which the pool's writer need not make then.
    fn state_to_change(&self, changes: impl Fn(BlockId) -> bool) -> MutexGuard<'_, State> {
        let wait = |state: &mut State| state.copying.is_some_and(&changes);
        closed_if_poisoned(self.copied.wait_while(self.state(), wait))
    }

    /// Copies the next block that was put ahead and is wanted still. None where none is due, or others wait.
    fn copy_ahead(&self, era: u64) -> Option<Copied> {
        let (block, content) = loop {
            let mut state = self.state();
            if state.era != era || !state.queue.is_empty() || !state.is_due(self.capacity) {
                return None;
            }
            let block = state.ahead.pop_front()?;
            state.is_ahead[block.index()] = false;
            if let Some(content) = state.wanted(block, self.min_uses) {
                state.copying = Some(block);
                break (block, content);
            }
        };
        let bytes = {
            let _closing = CloseOnPanic(self);
            self.copy(block, Vec::new())
        };
        let mut state = self.state();
        state.copying = None;
        state.note_copy(&content);
        self.copied.notify_one();
        Some((content, bytes))
    }

    /// A copy with its checksum at the end. None, which is counted, for bytes that another process did not leave so.
    fn sealed(&self, (content, mut bytes): Copied) -> Option<(BlockKey, Vec<u8>)> {
        let key = content.key;
        if content.sum.is_some_and(|sum| XxHash3_64::oneshot(&bytes) != sum) {
            let mut state = self.state();
            state.waiting.remove(&key);
            state.counts.damaged += 1;
            return None;
        }
        bytes.extend_from_slice(&checksum(&key, &bytes).to_le_bytes());
        Some((key, bytes))
    }

    /// The bytes of a block, with room for a checksum, in a buffer that is as long or empty.
    ///
    /// The pool's writer calls this before the block is handed out, another thread while the block is `copying`.
    fn copy(&self, block: BlockId, mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.clear();
        bytes.reserve_exact(self.memory.value_bytes());
        for place in self.memory.places(block) {
            // SAFETY: `Staging::new` has the promise that the tensors live. Nobody writes to the block: it has content,
            // and its bytes change after `withdrawn`, `moved` or `cleared`, which the writer is in or which waits.
            let part =
                unsafe { std::slice::from_raw_parts(place.as_ptr(), self.memory.block_bytes) };
            bytes.extend_from_slice(part);
        }
        bytes
    }
}

/// The state, closed where a thread panicked that had it.
fn closed_if_poisoned(state: LockResult<MutexGuard<'_, State>>) -> MutexGuard<'_, State> {
    state.unwrap_or_else(|poisoned| {
        let mut state = poisoned.into_inner();
        state.close();
        state
    })
}

/// Closes the state where a thread panics that copies without the lock, so that the pool's writer does not wait for it.
struct CloseOnPanic<'a>(&'a Shared);

impl Drop for CloseOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.state().close();
            self.0.copied.notify_one();
        }
    }
}

/// Evicted blocks between a pool and a slower tier. Clones are the same. Closed by a call that panics.
#[derive(Clone, Debug)]
pub struct Staging(Arc<Shared>);

impl Staging {
    /// Room for `capacity` bytes of blocks that were used `min_uses` times or more.
    ///
    /// # Safety
    ///
    /// Every byte of the tensors may be read and written as long as the result or a clone of it lives.
    #[must_use]
    pub unsafe fn new(memory: Memory, capacity: usize, min_uses: u32) -> Self {
        let state = State::new(memory.num_blocks);
        Self(Arc::new(Shared {
            capacity: capacity / memory.value_bytes(),
            memory,
            min_uses,
            state: Mutex::new(state),
            copied: Condvar::new(),
        }))
    }

    /// What a pool reports to.
    #[must_use]
    pub fn store(&self) -> Arc<dyn BackingStore> {
        Arc::new(self.clone())
    }

    /// A block of the pool has content that another process left. A copy whose XXH3 is not `sum` is not for the tier.
    pub(crate) fn restore(&self, block: BlockId, key: BlockKey, sum: Option<u64>) {
        let mut state = self.0.state();
        let content = Content { sum, ..Content::new(key, state.era, 1) };
        state.put(block, Some(content));
    }

    /// Whether a call has panicked: nothing is taken, found or kept any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.state().is_closed
    }

    /// How many clears there were, and whether blocks wait or are to be copied before they are evicted.
    #[must_use]
    pub fn era(&self) -> (u64, bool) {
        let state = self.0.state();
        let waits = !state.queue.is_empty() || state.is_due(self.0.capacity);
        (state.era, waits)
    }

    /// Takes up to `most` evicted blocks, the oldest first, each with its checksum at the end; none of another era.
    #[must_use]
    pub fn take(&self, most: usize, era: u64) -> Vec<(BlockKey, Vec<u8>)> {
        let mut state = self.0.state();
        let count = if state.era == era { most.min(state.queue.len()) } else { 0 };
        let taken: Vec<_> = state.queue.drain(..count).collect();
        drop(state);
        taken.into_iter().filter_map(|copied| self.0.sealed(copied)).collect()
    }

    /// As [`take`](Self::take), of blocks that are not evicted yet: where none waits that is, and more could be
    /// evicted than the queue has room for.
    #[must_use]
    pub fn take_ahead(&self, most: usize, era: u64) -> Vec<(BlockKey, Vec<u8>)> {
        let next = || self.0.copy_ahead(era);
        std::iter::from_fn(next).take(most).filter_map(|copied| self.0.sealed(copied)).collect()
    }

    /// The tier holds these from now on, unless another era has begun.
    pub fn add_stored(&self, keys: &[BlockKey], era: u64) {
        let mut state = self.0.state();
        if state.era == era && !state.is_closed {
            keys.iter().for_each(|&key| state.add_stored(key));
        }
    }

    /// The tier holds these no more.
    pub fn remove_stored(&self, keys: &[BlockKey]) {
        let mut state = self.0.state();
        keys.iter().for_each(|key| state.remove_stored(key));
    }

    /// The tier holds nothing, and what was taken is lost.
    pub fn clear_stored(&self) {
        let state = &mut *self.0.state();
        state.changed.extend(state.stored.intersection(&state.open));
        state.stored.clear();
        state.waiting = state.queue.iter().map(|(content, _)| content.key).collect();
    }

    /// Up to `most` blocks that the tier got or lost since they were reported last, and whether it holds each now.
    ///
    /// Blocks of a scope are never among them; those that an earlier process wrote are once this one has used them.
    #[must_use]
    pub fn take_changed(&self, most: usize) -> Vec<(BlockKey, bool)> {
        let state = &mut *self.0.state();
        let taken: Vec<_> = state.changed.iter().take(most).copied().collect();
        let held = |key: BlockKey| {
            state.changed.remove(&key);
            (key, state.stored.contains(&key))
        };
        taken.into_iter().map(held).collect()
    }

    /// Reports all that the tier holds again, to a reader who has forgotten it.
    pub fn report_again(&self) {
        let state = &mut *self.0.state();
        state.changed = state.stored.intersection(&state.open).copied().collect();
    }

    /// All that was or will be reported and that the tier holds.
    #[must_use]
    pub fn reported(&self) -> Vec<BlockKey> {
        let state = self.0.state();
        state.stored.intersection(&state.open).copied().collect()
    }

    /// How many leading ones of these the tier holds.
    #[must_use]
    pub fn count_stored(&self, keys: impl Iterator<Item = BlockKey>) -> usize {
        let state = self.0.state();
        keys.take_while(|key| state.stored.contains(key)).count()
    }

    /// Calls `work` with what the tier holds; nothing changes meanwhile, and the pool may not be changed either.
    pub fn with_stored<T>(&self, work: impl FnOnce(&HashSet<BlockKey>) -> T) -> T {
        work(&self.0.state().stored)
    }

    /// How many blocks the tier holds.
    #[must_use]
    pub fn num_stored(&self) -> usize {
        self.0.state().stored.len()
    }

    /// Writes what the tier gave to blocks of the pool, up to the first that is not what was written; how many.
    ///
    /// Fails for a block that the pool does not have.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes the blocks meanwhile: the caller holds them, and no step computes them.
    pub unsafe fn fill<'a>(
        &self,
        blocks: impl Iterator<Item = (BlockId, BlockKey, &'a [u8])>,
    ) -> Option<usize> {
        let memory = &self.0.memory;
        let mut filled = 0;
        for (block, key, value) in blocks {
            if block.is_null() || block.index() >= memory.num_blocks {
                return None;
            }
            let Some(bytes) = checked(&key, value, memory.value_bytes()) else {
                self.0.state().counts.damaged += 1;
                break;
            };
            for (place, part) in memory.places(block).zip(bytes.chunks_exact(memory.block_bytes)) {
                // SAFETY: the tensors live by the promise of `new`, and the caller has the block to itself.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), place.as_ptr(), part.len()) };
            }
            filled += 1;
        }
        Some(filled)
    }

    /// Lifetime counts. From any thread.
    #[must_use]
    pub fn counts(&self) -> StagingCounts {
        self.0.state().counts
    }
}

/// The sum over a block's key and bytes: a block that is stored under another's key does not fit either.
fn checksum(key: &BlockKey, bytes: &[u8]) -> u64 {
    let mut hasher = XxHash3_64::with_seed(u64::from(key.group.get()));
    hasher.write(key.hash.as_bytes());
    hasher.write(bytes);
    hasher.finish()
}

/// The bytes of a value, if it is as long as it should be and its checksum fits.
fn checked<'a>(key: &BlockKey, value: &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (bytes, sum) = value.split_last_chunk::<SUM_BYTES>()?;
    let fits = value.len() == len && checksum(key, bytes) == u64::from_le_bytes(*sum);
    fits.then_some(bytes)
}

impl BackingStore for Staging {
    fn published(&self, block: BlockId, key: &BlockKey) {
        let mut state = self.0.state();
        let content = Content::new(*key, state.era, 1 + u32::from(state.was_seen(key)));
        let content = state.is_durable.then_some(content);
        state.put(block, content);
    }

    fn keep_tokens(&self, block: BlockId, _tokens: BlockTokens<'_>) {
        if let Some(content) = &mut self.0.state().contents[block.index()] {
            content.is_open = true;
        }
    }

    fn kept_tokens(&self, _block: BlockId) -> Option<BlockTokens<'static>> {
        None
    }

    fn withdrawn(&self, block: BlockId) {
        let mut state = self.0.state_to_change(|copying| copying == block);
        let Some(content) = state.put(block, None) else {
            return;
        };
        if content.era != state.era {
            return;
        }
        let is_stored = state.stored.contains(&content.key);
        if is_stored || state.waiting.contains(&content.key) {
            if content.is_open && state.open.insert(content.key) && is_stored {
                state.changed.insert(content.key);
            }
        } else if !content.is_worth(self.0.min_uses) {
            state.counts.skipped += 1;
            state.remember(&content.key, SEEN_PER_BLOCK * self.0.memory.num_blocks);
        } else if let Some(buffer) = state.room(self.0.capacity) {
            state.note_copy(&content);
            let bytes = self.0.copy(block, buffer);
            state.queue.push_back((content, bytes));
        }
    }

    fn moved(&self, from: BlockId, to: BlockId) {
        // What `to` had was withdrawn before its bytes were written over.
        let mut state = self.0.state_to_change(|copying| copying == from);
        let content = state.put(from, None);
        state.put(to, content);
        state.put_ahead(to, self.0.min_uses);
    }

    fn used(&self, blocks: &[BlockId]) {
        let mut state = self.0.state();
        for block in blocks {
            if let Some(content) = &mut state.contents[block.index()] {
                content.uses = content.uses.saturating_add(1);
                content.unneeded = false;
            }
        }
    }

    fn queued(&self, block: BlockId, band: Band, pinned: bool) {
        self.classed(block, band, pinned);
        self.0.state().put_ahead(block, self.0.min_uses);
    }

    fn unneeded(&self, block: BlockId) {
        let mut state = self.0.state();
        if let Some(content) = &mut state.contents[block.index()] {
            content.unneeded = true;
        }
        // It was queued just now, before this was known of it.
        let is_last = state.ahead.back() == Some(&block);
        if is_last && state.wanted(block, self.0.min_uses).is_none() {
            state.ahead.pop_back();
            state.is_ahead[block.index()] = false;
        }
    }

    fn classed(&self, block: BlockId, band: Band, pinned: bool) {
        if let Some(content) = &mut self.0.state().contents[block.index()] {
            (content.band, content.pinned) = (band, pinned);
        }
    }

    fn is_sound(&self, _block: BlockId) -> bool {
        true
    }

    fn cleared(&self) {
        let mut state = self.0.state_to_change(|_| true);
        state.era += 1;
        state.num_found = 0;
        state.queue.clear();
        state.waiting.clear();
        state.stored.clear();
        state.open.clear();
        state.changed.clear();
        state.seen.iter_mut().for_each(HashSet::clear);
    }

    fn resized(&self, num_blocks: usize) {
        self.0.state().num_blocks = num_blocks;
    }

    fn set_durable(&self, durable: bool) {
        let mut state = self.0.state();
        state.is_durable = durable && !state.is_closed;
    }
}

/// The 34 bytes of a key: the hash, and the group, big endian.
#[must_use]
pub fn key_to_bytes(key: &BlockKey) -> [u8; 34] {
    let mut bytes = [0; 34];
    bytes[..32].copy_from_slice(key.hash.as_bytes());
    bytes[32..].copy_from_slice(&key.group.get().to_be_bytes());
    bytes
}

/// The key of [`key_to_bytes`].
#[must_use]
pub fn key_from_bytes(bytes: &[u8]) -> Option<BlockKey> {
    let (hash, group) = bytes.split_last_chunk::<2>()?;
    let hash = BlockHash::from_bytes(hash.try_into().ok()?);
    let group = GroupId::new(u16::from_be_bytes(*group));
    Some(BlockKey::new(hash, group))
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    const BLOCK_BYTES: usize = 16;

    /// Three blocks of two tensors, and a place for each.
    fn staging() -> (Staging, Vec<Vec<u8>>) {
        let mut tensors = vec![vec![0; 3 * BLOCK_BYTES]; 2];
        let starts = tensors.iter_mut().map(Vec::as_mut_ptr);
        let memory = Memory {
            tensors: starts.filter_map(NonNull::new).collect(),
            block_bytes: BLOCK_BYTES,
            num_blocks: 3,
            owner: Box::new(()),
        };
        // SAFETY: each test keeps the tensors, and touches them through the staging alone.
        let staging = unsafe { Staging::new(memory, 1000, 1) };
        staging.set_durable(true);
        (staging, tensors)
    }

    fn key(number: u8) -> BlockKey {
        BlockKey::new(BlockHash::from_bytes([number; 32]), GroupId::new(1))
    }

    fn value(number: u8) -> Vec<u8> {
        let mut value = vec![number; 2 * BLOCK_BYTES];
        let sum = checksum(&key(number), &value);
        value.extend_from_slice(&sum.to_le_bytes());
        value
    }

    fn fill(staging: &Staging, block: u32, number: u8, value: &[u8]) -> Option<usize> {
        let triple = (BlockId::new(block), key(number), value);
        // SAFETY: nobody else uses the tensors.
        unsafe { staging.fill([triple].into_iter()) }
    }

    #[test]
    fn content_that_moves_is_copied_from_where_it_is() {
        let (staging, _tensors) = staging();
        assert_eq!(fill(&staging, 2, 7, &value(7)), Some(1));
        staging.published(BlockId::new(1), &key(7));
        staging.moved(BlockId::new(1), BlockId::new(2));
        staging.withdrawn(BlockId::new(1));
        assert_eq!(staging.take(9, 0), vec![]);
        staging.withdrawn(BlockId::new(2));
        assert_eq!(staging.take(9, 1), vec![]);
        assert_eq!(staging.take(9, 0), vec![(key(7), value(7))]);
    }

    #[test]
    fn bytes_that_are_copied_ahead_do_not_change_meanwhile() {
        const LARGE: usize = 32 << 20;
        let mut tensor = vec![7_u8; 2 * LARGE];
        let start = NonNull::new(tensor.as_mut_ptr()).expect("memory");
        let memory =
            Memory { tensors: vec![start], block_bytes: LARGE, num_blocks: 2, owner: Box::new(()) };
        // SAFETY: the tensor outlives the staging, and is touched through it or its address alone.
        let staging = unsafe { Staging::new(memory, 0, 1) };
        let block = BlockId::new(1);
        staging.set_durable(true);
        staging.published(block, &key(7));
        staging.queued(block, Band::DEFAULT, false);
        assert_eq!(staging.era(), (0, false), "one free block");
        staging.resized(1);
        staging.unneeded(block);
        assert_eq!(staging.era(), (0, false), "behind a window");
        staging.used(&[block]);
        staging.queued(block, Band::DEFAULT, false);
        assert_eq!(staging.era(), (0, true));
        let taken = thread::scope(|scope| {
            let copy = scope.spawn(|| staging.take_ahead(9, 0));
            while staging.0.state().copying.is_none() && staging.counts().staged == 0 {
                thread::yield_now();
            }
            staging.withdrawn(block);
            // SAFETY: the block is inside the tensor, and its content was withdrawn.
            unsafe { start.add(LARGE).write_bytes(8, LARGE) };
            copy.join().expect("the copy")
        });
        let [(found, value)] = &taken[..] else {
            panic!("{} blocks", taken.len());
        };
        assert_eq!(*found, key(7));
        assert!(value[..LARGE] == tensor[..LARGE], "the block is torn");
        assert_eq!(staging.counts().staged, 1, "evicted, it was copied again");
    }

    #[test]
    fn a_call_that_panics_closes_it() {
        let reports_no_block: fn(&mut Staging) = |staging| {
            staging.published(BlockId::new(9), &key(8));
        };
        let copies_no_block: fn(&mut Staging) = |staging| {
            let shared = Arc::get_mut(&mut staging.0).expect("no clone");
            shared.memory.num_blocks = 1;
            shared.capacity = 0;
            staging.resized(1);
            staging.queued(BlockId::new(1), Band::DEFAULT, false);
            let _ = staging.take_ahead(9, 0);
        };
        for panics in [reports_no_block, copies_no_block] {
            let (mut staging, _tensors) = staging();
            staging.published(BlockId::new(1), &key(7));
            staging.add_stored(&[key(6)], 0);
            assert!(!staging.is_closed());
            assert!(catch_unwind(AssertUnwindSafe(|| panics(&mut staging))).is_err());
            assert!(staging.is_closed());
            staging.set_durable(true);
            staging.published(BlockId::new(2), &key(8));
            staging.withdrawn(BlockId::new(1)); // It waits for no copy.
            staging.withdrawn(BlockId::new(2));
            staging.add_stored(&[key(7)], 0);
            assert_eq!((staging.take(9, 0), staging.num_stored()), (vec![], 0));
        }
    }

    #[test]
    fn nothing_is_written_that_does_not_fit() {
        let (staging, _tensors) = staging();
        assert_eq!(fill(&staging, 0, 7, &value(7)), None);
        assert_eq!(fill(&staging, 3, 7, &value(7)), None);
        for wrong in [value(6), value(7)[1..].to_vec(), vec![], vec![7; 3]] {
            assert_eq!(fill(&staging, 1, 7, &wrong), Some(0));
        }
        assert_eq!(staging.counts().damaged, 4);
        assert_eq!(key_from_bytes(&key_to_bytes(&key(7))), Some(key(7)));
        assert_eq!(key_from_bytes(&[0; 33]), None);
    }
}
