//! The table of records, and what the pool's writer and the checksum thread do with it.
//!
//! Two threads write. The pool's single writer publishes, withdraws and moves; the checksum thread alone makes a
//! record valid, by one exchange of the state that the writer gave it. A record that the writer has withdrawn or
//! published again meanwhile has another state, so the exchange fails. A killed process leaves its stores in the
//! order in which its threads made them; that is all that the next one relies on.

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::thread::Thread;

use crossbeam_queue::SegQueue;
use memmap2::{MmapOptions, MmapRaw};
use prefixcache_core::backing::{BackingStore, KeptBlock, KeptHint};
use prefixcache_core::band::Band;
use prefixcache_core::events::{BlockTokens, ShortHash};
use prefixcache_core::id::{BlockId, BlockKey};
use twox_hash::XxHash3_64;

use crate::faults::{Fault, Injected};
use crate::hint::{self, HintWords};
use crate::layout::{EPOCH, HEADER_BYTES, HINT_WORDS, Layout, NUM_USED, TOKENS_HEAD};
use crate::record::{self, EPOCH_MASK, NONE, Record, Usage, Words};

use Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

/// Bytes of a block that are read at once.
const READ_BYTES: u64 = 256 << 10;

/// What a file has kept of another process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// In the order of eviction.
    pub blocks: Vec<KeptBlock>,
    /// Records that were there and are not used: of an earlier epoch, incomplete, or of no block of the pool.
    pub dropped: u64,
}

/// Lifetime counts.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Blocks whose records are valid, made by this process.
    pub(crate) kept: AtomicU64,
    /// Restored blocks that were read and have their checksum.
    pub(crate) checked: AtomicU64,
    /// Restored blocks that do not.
    pub(crate) failed: AtomicU64,
    /// Clears that the disk did not take.
    pub(crate) failed_syncs: AtomicU64,
}

/// The mapped header and records of an open file.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) file: File,
    pub(crate) layout: Layout,
    pub(crate) counters: Counters,
    pub(crate) stopped: AtomicBool,
    /// Whether the checksum thread waits to be woken.
    pub(crate) sleeps: AtomicBool,
    pub(crate) thread: OnceLock<Thread>,
    map: MmapRaw,
    durable: AtomicBool,
    /// Counts uses and publishings; only the writer changes them.
    num_uses: AtomicU64,
    num_published: AtomicU64,
    pending: SegQueue<(BlockId, u64)>,
    /// Restored blocks, what is evicted last first, to be read when nothing else is to be done.
    restored: SegQueue<BlockId>,
    /// Restored blocks that the next hit waits for: they are read first.
    asked: SegQueue<BlockId>,
    num_asked: AtomicUsize,
    /// Of restored blocks whose bytes were not compared yet the state of the record, which is odd; of those that
    /// were found damaged and not dropped yet [`damaged`] of it, which is even; of others 0.
    unread: Box<[AtomicU64]>,
    num_unread: AtomicUsize,
    /// Whether the header is to be written to the disk, for a clear.
    unsynced: AtomicBool,
    pub(crate) injected: Injected,
}

/// What stands for an unread block of this state that was found damaged.
fn damaged(state: u64) -> u64 {
    (state ^ 1).max(2)
}

fn is_unread(word: u64) -> bool {
    word & 1 == 1
}

impl Table {
    /// Maps the table of a file of this checked layout, whose length was checked too.
    pub(crate) fn new(file: File, layout: Layout) -> io::Result<Self> {
        let map = MmapOptions::new().len(layout.table_bytes()).map_raw(&file)?;
        let unread = (0..layout.capacity).map(|_| AtomicU64::new(0));
        Ok(Self {
            unread: unread.collect(),
            file,
            layout,
            map,
            counters: Counters::default(),
            stopped: AtomicBool::new(false),
            sleeps: AtomicBool::new(false),
            thread: OnceLock::new(),
            durable: AtomicBool::new(false),
            num_uses: AtomicU64::new(0),
            num_published: AtomicU64::new(0),
            pending: SegQueue::new(),
            restored: SegQueue::new(),
            asked: SegQueue::new(),
            num_asked: AtomicUsize::new(0),
            num_unread: AtomicUsize::new(0),
            unsynced: AtomicBool::new(false),
            injected: Injected::default(),
        })
    }

    /// A word of the header.
    fn header(&self, at: usize) -> &AtomicU64 {
        assert!(at < HEADER_BYTES / 8);
        // SAFETY: the mapping is readable, writable, aligned to a page and longer than the header, and lives as long
        // as self. Words that are shared with other threads and processes are atomics everywhere.
        unsafe { &*self.map.as_mut_ptr().cast::<AtomicU64>().add(at) }
    }

    fn records(&self) -> &[Record] {
        // SAFETY: as above; the records begin at a multiple of their alignment, and the mapping is as long as the
        // header and `capacity` of them. Any bytes are valid atomics.
        unsafe {
            let first = self.map.as_mut_ptr().add(HEADER_BYTES).cast::<Record>();
            std::slice::from_raw_parts(first, self.layout.capacity as usize)
        }
    }

    /// The words of a block's tokens: their check, whether there is a block before, its hash, two tokens each.
    fn token_words(&self, block: BlockId) -> &[AtomicU64] {
        self.part_words(block, self.layout.tokens_at(), self.layout.token_words())
    }

    /// See [`HINT_WORDS`].
    pub(crate) fn hint_words(&self, block: BlockId) -> &[AtomicU64; HINT_WORDS] {
        let words = self.part_words(block, self.layout.hints_at(), HINT_WORDS);
        words.first_chunk().expect("as many as were asked for")
    }

    /// The words of a block in a part of the table that begins at `first` and has `count` for each block.
    fn part_words(&self, block: BlockId, first: usize, count: usize) -> &[AtomicU64] {
        let capacity = self.layout.capacity;
        assert!(first.is_multiple_of(8) && u64::from(block.get()) < capacity);
        assert!(first + 8 * count * capacity as usize <= self.layout.table_bytes());
        // SAFETY: as above; the mapping is as long as the table, and has `count` words for each of `capacity` blocks from
        // `first` on.
        unsafe {
            let words = self.map.as_mut_ptr().add(first).cast::<AtomicU64>();
            std::slice::from_raw_parts(words.add(block.index() * count), count)
        }
    }

    /// The check of a block's token words, which ties them to what the block's record says.
    fn token_check(&self, block: BlockId, words: &[AtomicU64]) -> u64 {
        let mut hasher = XxHash3_64::with_seed(self.record(block).words().hash[3]);
        // Relaxed: the writer's own words, or those that another process left.
        for word in &words[1..] {
            hasher.write(&word.load(Relaxed).to_le_bytes());
        }
        hasher.finish()
    }

    /// The check of a hint's words, which ties them to the priority and to what the block's record says.
    fn hint_check(&self, block: BlockId, band: Band, words: HintWords) -> u64 {
        // Relaxed: as in `token_check`.
        hint::check(words, band, self.record(block).hash[3].load(Relaxed))
    }

    /// What was kept of the content's hint with this priority. None for the default one.
    fn kept_hint(&self, block: BlockId, band: Band) -> Option<KeptHint> {
        // Relaxed: as in `token_check`.
        let [check, words @ ..] = self.hint_words(block).each_ref().map(|word| word.load(Relaxed));
        let is_kept = band != Band::DEFAULT && check == self.hint_check(block, band, words);
        is_kept.then(|| hint::of_words(words, hint::now()))
    }

    pub(crate) fn record(&self, block: BlockId) -> &Record {
        &self.records()[block.index()]
    }

    pub(crate) fn seed(&self) -> u64 {
        u64::from_le_bytes(self.layout.digest.as_chunks().0[0])
    }

    /// See [`record::put`].
    fn put(&self, word: &AtomicU64, value: u64) {
        record::put(word, value, self.survives());
    }

    fn survives(&self) -> impl Fn() -> bool {
        || self.injected.survives_write()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.header(EPOCH).load(Acquire) & EPOCH_MASK
    }

    // At the start.

    /// See [`KvFile::take_kept`](crate::KvFile::take_kept).
    pub(crate) fn take_kept(&self, num_blocks: usize, num_groups: u16) -> Kept {
        let used = self.header(NUM_USED).load(Acquire);
        let mut kept = Vec::new();
        let mut dropped = 0;
        for (index, record) in self.records().iter().enumerate().skip(1) {
            if index as u64 >= used {
                break;
            }
            let id = BlockId::new(index as u32);
            let words = record.valid_words(id, self.seed());
            let is_current = |words: &Words| words.epoch() == self.epoch();
            let words =
                words.filter(|words| is_current(words) || self.injected.plants(Fault::StaleEpoch));
            let fits = |words: &Words| index < num_blocks && words.key().group.get() < num_groups;
            match words.filter(fits) {
                Some(words) => kept.push((Usage(record.usage.load(Relaxed)), id, words.key())),
                None if record.state() != NONE => {
                    self.put(&record.state, NONE);
                    dropped += 1;
                }
                None => {}
            }
        }
        kept.sort_by_key(|&(usage, id, _)| (usage.rank(), id));
        for &(_, id, _) in kept.iter().rev() {
            self.set_unread(id, self.record(id).state());
            self.restored.push(id);
        }
        let block = |&(usage, block, key): &(Usage, BlockId, BlockKey)| KeptBlock {
            block,
            key,
            band: usage.band(),
            hint: self.kept_hint(block, usage.band()),
            pinned: usage.pinned(),
        };
        Kept { blocks: kept.iter().map(block).collect(), dropped }
    }

    /// Of the writer; what the word was.
    fn set_unread(&self, block: BlockId, word: u64) -> u64 {
        // Release: whoever reads the block because of the word sees the bytes that were there before. Acquire: what
        // the checksum thread found of the block comes before what happens to it now.
        let before = self.unread[block.index()].swap(word, AcqRel);
        // Relaxed: a count that orders nothing.
        match (is_unread(before), is_unread(word)) {
            (false, true) => _ = self.num_unread.fetch_add(1, Relaxed),
            (true, false) => _ = self.num_unread.fetch_sub(1, Relaxed),
            _ => {}
        }
        before
    }

    pub(crate) fn unread(&self, block: BlockId) -> u64 {
        // Acquire: as in `set_unread`.
        self.unread[block.index()].load(Acquire)
    }

    /// How many valid records there are, and how many of them do not fit their blocks, which `reads` looks at.
    pub(crate) fn survey(&self, reads: bool) -> (u64, u64) {
        let used = self.header(NUM_USED).load(Acquire);
        let all = 1..used.min(self.layout.capacity) as u32;
        let (mut valid, mut damaged) = (0, 0);
        for id in all.map(BlockId::new) {
            let words = self.record(id).valid_words(id, self.seed());
            let words = words.filter(|words| words.epoch() == self.epoch());
            valid += u64::from(words.is_some());
            let sum = words.filter(|_| reads).map(|words| words.sum);
            damaged += u64::from(sum.is_some_and(|sum| self.sum_of_bytes(id).ok() != Some(sum)));
        }
        (valid, damaged)
    }

    // Checksums.

    /// Reads a block. Through the file, not a mapping: it may be written to meanwhile.
    fn sum_of_bytes(&self, block: BlockId) -> io::Result<u64> {
        let size = self.layout.block_bytes;
        let mut buffer = vec![0; size.min(READ_BYTES) as usize];
        let mut hasher = XxHash3_64::with_seed(0);
        for tensor in 0..self.layout.num_tensors {
            let begin = self.layout.tensor_at(tensor) + u64::from(block.get()) * size;
            for at in (0..size).step_by(buffer.len()) {
                let part = &mut buffer[..(size - at).min(READ_BYTES) as usize];
                self.file.read_exact_at(part, begin + at)?;
                hasher.write(part);
            }
        }
        Ok(hasher.finish())
    }

    /// Makes the record of one published block valid; false when there is none to do.
    pub(crate) fn complete_next(&self) -> bool {
        let Some((block, state)) = self.pending.pop() else {
            return false;
        };
        let record = self.record(block);
        if record.state() == state
            && let Ok(sum) = self.sum_of_bytes(block)
        {
            self.complete(block, state, sum);
        }
        true
    }

    /// Reads a block that a hit waits for; false when there is none.
    pub(crate) fn check_asked(&self) -> bool {
        let asked = self.asked.pop();
        if let Some(block) = asked {
            self.check(block);
            // Release: whoever sees that nothing is asked for any more sees what was found.
            self.num_asked.fetch_sub(1, Release);
        }
        asked.is_some()
    }

    /// Blocks that [`BackingStore::reads_first`] asked for and that were not read yet.
    pub(crate) fn num_asked(&self) -> usize {
        // Acquire: as in `check_asked`.
        self.num_asked.load(Acquire)
    }

    /// Reads a restored block that nobody has hit yet; false when there is none.
    pub(crate) fn check_next(&self) -> bool {
        let restored = self.restored.pop();
        if let Some(block) = restored {
            self.check(block);
        }
        restored.is_some()
    }

    /// Of the checksum thread. A block that is damaged is left to its first hit, which drops it without reading it.
    fn check(&self, block: BlockId) {
        let word = self.unread(block);
        if is_unread(word) {
            // Relaxed: where it is of other content, the word is another one too.
            let expected = self.record(block).sum.load(Relaxed);
            let is_sound = self.sum_of_bytes(block).ok() == Some(expected);
            self.end_check(block, word, is_sound);
        }
    }

    /// Notes what was found of the content that the block had when its word was read.
    pub(crate) fn end_check(&self, block: BlockId, word: u64, is_sound: bool) {
        let after = if is_sound { 0 } else { damaged(word) };
        // AcqRel: as in `set_unread`. Content that came meanwhile has another word, and is still to be read.
        if self.unread[block.index()].compare_exchange(word, after, AcqRel, Relaxed).is_ok() {
            // Relaxed: counts that order nothing.
            self.num_unread.fetch_sub(1, Relaxed);
            self.counters.checked.fetch_add(is_sound.into(), Relaxed);
        }
    }

    fn complete(&self, block: BlockId, state: u64, sum: u64) {
        let (record, seed) = (self.record(block), self.seed());
        if record.complete(block, state, sum, seed, self.survives()) {
            self.counters.kept.fetch_add(1, Relaxed);
        }
    }

    /// Whether something is to be done before the process ends.
    pub(crate) fn has_pending(&self) -> bool {
        // Relaxed: who sets it wakes the thread after that, or ends it.
        !self.pending.is_empty() || self.unsynced.load(Relaxed)
    }

    /// Whether the checksum thread has something to do but for blocks that nobody waits for.
    pub(crate) fn has_work(&self) -> bool {
        self.has_pending() || !self.asked.is_empty()
    }

    /// Writes a clear to the disk.
    pub(crate) fn sync(&self) {
        // Acquire: the header has what was cleared before.
        if !self.unsynced.swap(false, Acquire) {
            return;
        }
        let outcome = self.map.flush_range(0, HEADER_BYTES);
        if outcome.is_err() || self.injected.plants(Fault::FailedSync) {
            self.counters.failed_syncs.fetch_add(1, Relaxed);
        }
    }

    fn enqueue(&self, block: BlockId, state: u64) {
        // Relaxed: after the end nothing is kept any more, sooner or later.
        if self.stopped.load(Relaxed) {
            return;
        }
        self.pending.push((block, state));
        self.wake();
    }

    /// Lets the checksum thread see what there is to do.
    fn wake(&self) {
        // Of this thread and the one that goes to sleep at least one sees what the other stored before its fence.
        fence(SeqCst);
        if self.sleeps.load(Relaxed)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// See [`Record::write`].
    fn write(&self, block: BlockId, words: &Words, state: u64) {
        if u64::from(block.get()) >= self.header(NUM_USED).load(Relaxed) {
            self.put(self.header(NUM_USED), u64::from(block.get()) + 1);
        }
        self.record(block).write(words, state, self.survives());
    }

    /// The state of a record to which no checksum belongs yet.
    fn next_state(&self) -> u64 {
        // Relaxed: the writer alone counts.
        2 * (self.num_published.fetch_add(1, Relaxed) + 1)
    }

    fn next_use(&self) -> u64 {
        self.num_uses.fetch_add(1, Relaxed) + 1
    }

    fn is_durable(&self) -> bool {
        self.durable.load(Relaxed)
    }
}

impl BackingStore for Table {
    fn published(&self, block: BlockId, key: &BlockKey) {
        self.withdrawn(block);
        if !self.is_durable() && !self.injected.plants(Fault::KeepTags) {
            return;
        }
        let (state, usage) = (self.next_state(), Usage::in_use(self.next_use()));
        self.put(&self.record(block).usage, usage.0);
        self.write(block, &Words::of(key, self.epoch()), state);
        self.enqueue(block, state);
    }

    fn keep_tokens(&self, block: BlockId, tokens: BlockTokens<'_>) {
        let words = self.token_words(block);
        if words.is_empty() || self.record(block).state() == NONE {
            return;
        }
        self.put(&words[1], tokens.parent.is_some().into());
        self.put(&words[2], tokens.parent.map_or(0, |parent| parent.0));
        for (word, pair) in words[TOKENS_HEAD..].iter().zip(tokens.tokens.chunks(2)) {
            let second = pair.get(1).copied().unwrap_or(0);
            self.put(word, u64::from(pair[0]) | u64::from(second) << 32);
        }
        self.put(&words[0], self.token_check(block, words));
    }

    fn keep_hint(&self, block: BlockId, band: Band, hint: KeptHint) {
        if self.record(block).state() == NONE {
            return;
        }
        let words = hint::to_words(hint, hint::now());
        let [check, rest @ ..] = self.hint_words(block);
        for (word, value) in rest.iter().zip(words) {
            self.put(word, value);
        }
        self.put(check, self.hint_check(block, band, words));
    }

    fn kept_tokens(&self, block: BlockId) -> Option<BlockTokens<'static>> {
        let words = self.token_words(block);
        // Relaxed: as in `token_check`.
        let load = |at: usize| words[at].load(Relaxed);
        if words.is_empty() || load(0) != self.token_check(block, words) {
            return None;
        }
        let pairs = (TOKENS_HEAD..words.len()).map(load);
        let mut tokens: Vec<u32> =
            pairs.flat_map(|pair| [pair as u32, (pair >> 32) as u32]).collect();
        tokens.truncate(self.layout.block_tokens as usize);
        Some(BlockTokens {
            parent: (load(1) != 0).then(|| ShortHash(load(2))),
            tokens: tokens.into(),
        })
    }

    fn withdrawn(&self, block: BlockId) {
        if self.injected.plants(Fault::KeepEvicted) {
            return;
        }
        self.set_unread(block, 0);
        self.record(block).withdraw(self.survives());
    }

    fn moved(&self, from: BlockId, to: BlockId) {
        self.withdrawn(to);
        let record = self.record(from);
        let (state, words) = (record.state(), record.words());
        if state != NONE {
            self.put(&self.record(to).usage, record.usage.load(Relaxed));
            if state & 1 == 1 {
                self.write(to, &words, words.valid(to, self.seed()));
            } else {
                let state = self.next_state();
                self.write(to, &words, state);
                self.enqueue(to, state);
            }
            let parts_of =
                |block| [self.hint_words(block), self.token_words(block)].into_iter().flatten();
            for (word, value) in parts_of(to).zip(parts_of(from)) {
                self.put(word, value.load(Relaxed));
            }
            let state = self.record(to).state();
            self.set_unread(
                to,
                match self.unread(from) {
                    0 => 0,
                    word if is_unread(word) => state,
                    _ => damaged(state),
                },
            );
        }
        self.withdrawn(from);
    }

    fn used(&self, blocks: &[BlockId]) {
        for &block in blocks {
            let record = self.record(block);
            if record.state() != NONE {
                let usage = Usage(record.usage.load(Relaxed));
                self.put(&record.usage, usage.used_again(self.next_use()).0);
            }
        }
    }

    fn queued(&self, block: BlockId, band: Band, pinned: bool) {
        let record = self.record(block);
        if record.state() != NONE {
            let usage = Usage::queued(self.next_use(), band, pinned);
            self.put(&record.usage, usage.0);
        }
    }

    fn classed(&self, block: BlockId, band: Band, pinned: bool) {
        let record = self.record(block);
        if record.state() != NONE {
            let usage = Usage(record.usage.load(Relaxed)).classed(band, pinned);
            self.put(&record.usage, usage.0);
        }
    }

    fn is_sound(&self, block: BlockId) -> bool {
        let word = self.unread(block);
        if word == 0 || self.injected.plants(Fault::NoChecksum) {
            return true;
        }
        let expected = self.record(block).sum.load(Relaxed);
        let is_sound = is_unread(word) && self.sum_of_bytes(block).is_ok_and(|sum| sum == expected);
        let counter = match is_sound {
            true => &self.counters.checked,
            false => &self.counters.failed,
        };
        // Of the writer and the checksum thread, which may read a block at the same time, one counts it.
        if self.set_unread(block, 0) != 0 {
            counter.fetch_add(1, Relaxed);
        }
        is_sound
    }

    fn reads_first(&self, blocks: &mut dyn Iterator<Item = BlockId>, most: usize) -> bool {
        // Relaxed: the writer's own count but for what was read meanwhile.
        if self.num_unread.load(Relaxed) <= most {
            return false;
        }
        let unread: Vec<BlockId> = blocks.filter(|&block| is_unread(self.unread(block))).collect();
        if unread.len() <= most || self.stopped.load(Relaxed) {
            return false;
        }
        // Relaxed: the writer itself waits for it to fall.
        self.num_asked.fetch_add(unread.len(), Relaxed);
        unread.into_iter().for_each(|block| self.asked.push(block));
        self.wake();
        true
    }

    fn cleared(&self) {
        if self.injected.plants(Fault::KeepCleared) {
            return;
        }
        self.put(self.header(EPOCH), (self.epoch() + 1) & EPOCH_MASK);
        // After a power loss too, from moments later on: the writer does not wait for the disk. Where that fails,
        // what was cleared can come back after a power loss alone. Release: as in `sync`.
        self.unsynced.store(true, Release);
        self.wake();
    }

    fn set_durable(&self, durable: bool) {
        self.durable.store(durable, Relaxed);
    }
}
