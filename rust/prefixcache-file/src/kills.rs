//! A process that dies at any of its writes, and the next one, which must find nothing wrong.
//!
//! The process drives a pool over a file in memory. All that it writes, to records, header and blocks, counts, and
//! from a chosen write on nothing reaches the file any more, as after `kill -9`. The next process restores what there
//! is; each block that it hits must have the bytes of its key, and the key must have been published since the last
//! clear, under weights that are named by their content. For a power loss some of the last writes are undone first.
//! What is evicted goes on to a tier, which must get nothing else.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::MmapOptions;
use prefixcache_core::backing::{KeptBlock, KeptHint};
use prefixcache_core::band::Band;
use prefixcache_core::events::{BlockTokens, Change, ShortHash};
use prefixcache_core::hints::Owner;
use prefixcache_core::id::{BlockHash, BlockId, BlockKey, GroupId};
use prefixcache_core::pool::BlockState;
use prefixcache_core::store::{BlockStore, Lookup, Moves, PoolConfig, WithReaders};
use prefixcache_core::{Writer, store};
use prefixcache_oracle::random::Random;

use crate::faults::Fault;
use crate::layout::{Layout, OpenError};
use crate::staging::{Memory, Staging};
use crate::{FORMAT_VERSION, KvFile, checker, describe};

pub(crate) const NUM_BLOCKS: usize = 12;
const BLOCK_BYTES: u64 = 24;
const NUM_TENSORS: u32 = 2;
const BLOCK_TOKENS: usize = 3;

pub(crate) fn layout() -> Layout {
    Layout {
        digest: [7; 32],
        num_tensors: NUM_TENSORS,
        block_bytes: BLOCK_BYTES,
        capacity: NUM_BLOCKS as u64,
        block_tokens: BLOCK_TOKENS as u32,
        about: "a test".to_owned(),
    }
}

pub(crate) fn file_in_memory() -> File {
    // SAFETY: the name is a C string; the call has no other condition.
    let fd = unsafe { libc::memfd_create(c"kv".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "no file in memory");
    // SAFETY: the descriptor is new, and nobody else's.
    unsafe { File::from_raw_fd(fd) }
}

fn key(number: u64) -> BlockKey {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    hash[24..].copy_from_slice(&number.to_le_bytes());
    BlockKey::new(BlockHash::from_bytes(hash), GroupId::new(0))
}

fn number(key: &BlockKey) -> u64 {
    u64::from_le_bytes(key.hash.as_bytes().as_chunks().0[0])
}

/// The bytes of a block in a tensor.
fn bytes_of(number: u64, tensor: u32) -> [u8; BLOCK_BYTES as usize] {
    let mut random = Random(number * 2 + u64::from(tensor));
    std::array::from_fn(|_| random.word() as u8)
}

/// What KV events report of a block; of a third of them nothing, as of salted ones.
fn tokens_of(number: u64) -> Option<BlockTokens<'static>> {
    let mut random = Random(!number);
    (!number.is_multiple_of(3)).then(|| BlockTokens {
        parent: number.is_multiple_of(2).then(|| ShortHash(random.word())),
        tokens: (0..BLOCK_TOKENS).map(|_| random.word() as u32).collect(),
    })
}

/// Who raises a block: not always the same, so that what was kept of other content would be noticed.
fn hint_of(number: u64) -> KeptHint {
    let owner = Some(Owner::named(&number.to_string()));
    KeptHint { owner, ttl: 1 + number % 1_000_000_000, left: u64::MAX }
}

/// Whether nothing was kept, or what is right.
fn hint_fits(kept: &KeptBlock) -> bool {
    let expected = hint_of(number(&kept.key));
    kept.hint.is_none_or(|hint| {
        (hint.owner, hint.ttl, kept.band) == (expected.owner, expected.ttl, Band::of(80))
    })
}

/// Room for that many evicted blocks of a file.
fn staging_of(file: &File, kv: &KvFile, room: usize) -> Staging {
    let map = MmapOptions::new().map_raw(file).unwrap();
    let place = |tensor| NonNull::new(map.as_mut_ptr().wrapping_add(kv.tensor_at(tensor) as usize));
    let memory = Memory {
        tensors: (0..NUM_TENSORS).filter_map(place).collect(),
        block_bytes: BLOCK_BYTES as usize,
        num_blocks: NUM_BLOCKS,
        owner: Box::new(map),
    };
    let capacity = room * memory.value_bytes();
    // SAFETY: the owner maps the whole file, and the test's one thread alone writes to it.
    unsafe { Staging::new(memory, capacity, 1) }
}

/// The blocks that a tier takes, each with whether it has the bytes of its key.
fn staged(staging: &Staging) -> Vec<(u64, bool)> {
    let (era, _) = staging.era();
    let taken = [staging.take(9, era), staging.take_ahead(9, era)].into_iter().flatten();
    let is_right = |(key, value): (BlockKey, Vec<u8>)| {
        let number = number(&key);
        let bytes: Vec<u8> = (0..NUM_TENSORS).flat_map(|tensor| bytes_of(number, tensor)).collect();
        (number, value.starts_with(&bytes))
    };
    taken.map(is_right).collect()
}

struct Process {
    file: KvFile,
    staging: Staging,
    data: File,
    pool: Writer,
    moves: Moves,
    held: Vec<Vec<BlockId>>,
    /// What may be found after a restart.
    findable: HashSet<u64>,
    published: Vec<u64>,
    is_durable: bool,
    /// Bytes as they were, for a power loss.
    undo: Vec<(u64, Vec<u8>)>,
    /// What a reader of events was given of another process' blocks.
    reported: Vec<(ShortHash, BlockTokens<'static>)>,
    failures: Vec<String>,
}

/// Blocks that an event says to be stored.
fn blocks_of(change: Change) -> Vec<(ShortHash, BlockTokens<'static>)> {
    let Change::Stored(run) = change else {
        return Vec::new();
    };
    let parents = std::iter::once(run.parent).chain(run.hashes.iter().copied().map(Some));
    let tokens = run.tokens.chunks(BLOCK_TOKENS);
    let blocks = parents
        .zip(tokens)
        .map(|(parent, tokens)| BlockTokens { parent, tokens: tokens.to_vec().into() });
    run.hashes.iter().copied().zip(blocks).collect()
}

impl Process {
    fn start(file: &File, fault: Option<Fault>, writes: u64) -> Self {
        let mut kv = KvFile::open_without_thread(file.try_clone().unwrap(), &layout()).unwrap();
        let injected = &mut kv.table_mut().unwrap().injected;
        injected.fault = fault;
        let kept = kv.take_kept(NUM_BLOCKS, 1);
        let mut pool = Writer::new(PoolConfig::new(NUM_BLOCKS)).unwrap();
        let staging = staging_of(file, &kv, 3);
        let restored = pool.keep_in(kv.store_with(&staging, &kept.blocks), &kept.blocks).unwrap();
        assert_eq!(restored, kept.blocks.len());
        pool.set_durable(true);
        let events = pool.keep_events(BLOCK_TOKENS).unwrap().take(usize::MAX);
        kv.table().injected.writes_left.store(writes, Relaxed);
        let numbers: Vec<u64> = kept.blocks.iter().map(|one| number(&one.key)).collect();
        let wrong = kept.blocks.iter().filter(|kept| !hint_fits(kept));
        Self {
            file: kv,
            staging,
            data: file.try_clone().unwrap(),
            pool,
            moves: Moves::default(),
            held: Vec::new(),
            findable: numbers.iter().copied().collect(),
            published: numbers,
            is_durable: true,
            undo: Vec::new(),
            reported: events.into_iter().flat_map(blocks_of).collect(),
            failures: wrong.map(|kept| format!("{kept:?} has another's hint")).collect(),
        }
    }

    fn is_dead(&self) -> bool {
        self.file.table().injected.is_dead()
    }

    fn plants(&self, fault: Fault) -> bool {
        self.file.table().injected.plants(fault)
    }

    fn place(&self, block: BlockId, tensor: u32) -> u64 {
        self.file.tensor_at(tensor) + u64::from(block.get()) * BLOCK_BYTES
    }

    fn write_part(&mut self, at: u64, bytes: &[u8]) {
        if self.file.table().injected.survives_write() {
            let mut before = vec![0; bytes.len()];
            self.data.read_exact_at(&mut before, at).unwrap();
            self.undo.push((at, before));
            self.data.write_all_at(bytes, at).unwrap();
        }
    }

    fn write_bytes(&mut self, block: BlockId, number: u64) {
        for tensor in 0..NUM_TENSORS {
            let bytes = bytes_of(number, tensor);
            let (one, other) = bytes.split_at(bytes.len() / 2);
            let at = self.place(block, tensor);
            self.write_part(at, one);
            self.write_part(at + one.len() as u64, other);
        }
    }

    fn copy_bytes(&mut self, from: BlockId, to: BlockId) {
        for tensor in 0..NUM_TENSORS {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            let (here, there) = (self.place(from, tensor), self.place(to, tensor));
            self.data.read_exact_at(&mut bytes, here).unwrap();
            self.write_part(there, &bytes);
        }
    }

    /// One random call.
    fn act(&mut self, random: &mut Random) {
        match random.below(16) {
            0..=5 => self.compute(random),
            6..=8 => self.release(random),
            9 => self.hit(random),
            10 => self.classify(random),
            11 if random.below(4) == 0 => self.clear(random),
            12 if random.below(2) == 0 => self.resize(random),
            _ => {}
        }
        for _ in 0..random.below(4) {
            self.file.table().complete_next();
        }
        if random.below(3) == 0 {
            self.file.table().check_next();
        }
        self.stage();
    }

    fn stage(&mut self) {
        let wrong = staged(&self.staging).into_iter().filter(|(_, is_right)| !is_right);
        let failures = wrong.map(|(number, _)| format!("{number} is wrong on the tier"));
        if !self.is_dead() {
            self.failures.extend(failures);
        }
    }

    fn compute(&mut self, random: &mut Random) {
        let epoch = self.pool.epoch();
        let mut blocks = Vec::new();
        let count = 1 + random.below(3) as usize;
        if self.pool.allocate(count, &mut blocks).is_err() {
            return;
        }
        for &block in &blocks {
            let number = match random.below(8) {
                0 => self.published.last().copied().unwrap_or(1),
                _ => random.word() >> 1,
            };
            let is_early = self.plants(Fault::RecordFirst);
            if !is_early {
                self.write_bytes(block, number);
            }
            let _registration = self.pool.register(block, key(number), epoch).unwrap();
            if let Some(tokens) = tokens_of(number) {
                self.pool.keep_tokens(block, tokens);
            }
            if is_early {
                self.file.table().complete_next();
                self.write_bytes(block, number);
            }
            self.published.push(number);
            if self.is_durable {
                self.findable.insert(number);
            }
        }
        self.held.push(blocks);
    }

    fn release(&mut self, random: &mut Random) {
        if !self.held.is_empty() {
            let at = random.below(self.held.len() as u64) as usize;
            let mut blocks = self.held.swap_remove(at);
            blocks.reverse();
            self.pool.release(&blocks).unwrap();
        }
    }

    fn hit(&mut self, random: &mut Random) {
        let at = random.below(self.published.len().max(1) as u64) as usize;
        let Some(&number) = self.published.get(at) else { return };
        if let Some(block) = self.take_hit(number) {
            self.held.push(vec![block]);
        }
    }

    /// Takes a hit, whose bytes must be those of its key.
    fn take_hit(&mut self, number: u64) -> Option<BlockId> {
        let mut blocks = Vec::new();
        let hits = self.pool.commit([key(number)].into_iter(), 0, &mut blocks);
        let block = (hits == Ok(1)).then(|| blocks[0])?;
        if !self.is_dead() {
            for tensor in 0..NUM_TENSORS {
                let mut bytes = [0; BLOCK_BYTES as usize];
                let at = self.place(block, tensor);
                self.data.read_exact_at(&mut bytes, at).unwrap();
                if bytes != bytes_of(number, tensor) {
                    self.failures.push(format!("block {block} has wrong bytes"));
                }
            }
        }
        Some(block)
    }

    fn classify(&mut self, random: &mut Random) {
        if let Some(blocks) = self.held.last() {
            let key = self.pool.key_of(blocks[0]);
            match random.below(4) {
                0 => drop(self.pool.pin(blocks).unwrap()),
                // Another copy may have the priority.
                1 => drop(self.pool.set_band(&key, blocks[0], Band::of(80))),
                2 => {
                    self.pool.keep_hint(blocks[0], Band::of(80), hint_of(number(&key)));
                    self.pool.set_band(&key, blocks[0], Band::of(80));
                }
                _ => drop(self.pool.demote(1)),
            }
        }
    }

    fn clear(&mut self, random: &mut Random) {
        self.pool.clear_index();
        if !self.is_dead() {
            self.findable.clear();
        }
        self.is_durable = random.below(2) == 0;
        self.pool.set_durable(self.is_durable);
    }

    fn resize(&mut self, random: &mut Random) {
        let size = 4 + random.below(NUM_BLOCKS as u64 - 3) as usize;
        if size < self.pool.num_blocks() {
            for _ in 0..2 {
                self.pool.begin_moves(size, 4, &mut self.moves).unwrap();
                let pairs: Vec<store::Move> = self.moves.in_flight().to_vec();
                for one in pairs {
                    self.copy_bytes(one.from, one.to);
                }
                self.pool.finish_moves(&mut self.moves).unwrap();
            }
        }
        self.pool.resize(size).unwrap();
    }

    /// What this process, the next one after a death, finds of `findable`.
    fn check_all(&mut self, findable: &HashSet<u64>, torn: bool) -> usize {
        let mut failures = Vec::new();
        for number in self.published.clone() {
            if !findable.contains(&number) {
                failures.push(format!("{number} should not be found"));
            }
            match self.take_hit(number) {
                Some(block) => self.pool.release(&[block]).unwrap(),
                None if torn => {}
                None => failures.push(format!("{number} was torn")),
            }
        }
        let known: HashMap<ShortHash, u64> =
            (self.published.iter()).map(|&number| ((&key(number).hash).into(), number)).collect();
        for (name, tokens) in &self.reported {
            if known.get(name).and_then(|&number| tokens_of(number)).as_ref() != Some(tokens) {
                failures.push(format!("{name:?} is reported with other tokens"));
            }
        }
        self.failures.append(&mut failures);
        self.stage();
        self.pool.validate().unwrap();
        self.published.len()
    }
}

/// A process that dies at its `writes`-th write, and the next one; what that found, and what was wrong with it.
fn die_and_restart(
    seed: u64,
    writes: u64,
    fault: Option<Fault>,
    power_loss: bool,
) -> (usize, Vec<String>) {
    let file = file_in_memory();
    let mut random = Random(seed);
    let mut findable = HashSet::new();
    let mut failures = Vec::new();
    for life in 0..2 {
        let mut process = Process::start(&file, fault, writes);
        for _ in 0..200 {
            if process.is_dead() {
                break;
            }
            process.act(&mut random);
        }
        if power_loss && life == 1 {
            let lost = process.undo.len() as u64;
            let kept = random.below(lost + 1) as usize;
            for (at, before) in process.undo.split_off(kept).into_iter().rev() {
                if random.below(2) == 0 {
                    file.write_all_at(&before, at).unwrap();
                }
            }
        }
        findable = process.findable;
        failures.append(&mut process.failures);
        drop(process.file);
    }
    let mut next = Process::start(&file, fault, u64::MAX);
    let found = next.check_all(&findable, power_loss);
    failures.append(&mut next.failures);
    (found, failures)
}

/// As many seeds as a quick run has, or more where PROPTEST_CASES asks for more than its usual 256.
fn seeds(usual: u64) -> Range<u64> {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse::<u64>().ok());
    0..usual * asked.unwrap_or(256).div_ceil(256)
}

/// Everything wrong in some hundred deaths with this fault.
fn all_failures(fault: Fault, power_loss: bool) -> Vec<String> {
    let outcome = |seed| die_and_restart(seed, 40 + 7 * (seed % 60), Some(fault), power_loss).1;
    (0..60).flat_map(outcome).collect()
}

#[test]
fn a_process_killed_at_any_write_leaves_no_torn_block() {
    let mut found = 0;
    for seed in seeds(3) {
        for writes in 1..400 {
            let (count, failures) = die_and_restart(seed, writes, None, false);
            assert_eq!(failures, [""; 0], "seed {seed}, {writes} writes");
            found += count;
        }
    }
    assert!(found > 1_000, "only {found} blocks were restored");
}

#[test]
fn a_power_loss_loses_blocks_and_tears_none() {
    let mut found = 0;
    for seed in seeds(500) {
        let (count, failures) = die_and_restart(seed, 40 + 7 * (seed % 60), None, true);
        assert_eq!(failures, [""; 0], "seed {seed}");
        found += count;
    }
    assert!(found > 500, "only {found} blocks were restored");
}

#[test]
fn planted_faults_are_found() {
    for (fault, power_loss) in [
        (Fault::RecordFirst, false),
        (Fault::KeepEvicted, false),
        (Fault::KeepCleared, false),
        (Fault::StaleEpoch, false),
        (Fault::KeepTags, false),
        (Fault::NoChecksum, true),
        (Fault::StageUnread, true),
    ] {
        assert_ne!(all_failures(fault, power_loss), [""; 0], "{fault:?}");
    }
}

#[test]
fn order_pins_and_priorities_come_back() {
    for seed in seeds(500) {
        let file = file_in_memory();
        let mut random = Random(seed);
        let mut process = Process::start(&file, None, u64::MAX);
        for _ in 0..100 {
            process.act(&mut random);
        }
        while !process.held.is_empty() {
            process.release(&mut random);
        }
        process.clear(&mut random);
        process.pool.set_durable(true);
        process.pool.resize(NUM_BLOCKS).unwrap();
        for _ in 0..30 {
            match random.below(4) {
                0 => process.release(&mut random),
                1 => process.classify(&mut random),
                2 => process.hit(&mut random),
                _ => process.compute(&mut random),
            }
        }
        while !process.held.is_empty() {
            process.release(&mut random);
        }
        check_restart(process, &file, &format!("seed {seed}"));
    }
}

/// The pool counts such a pin until its block is handed out; a restart brings back neither the content nor the pin.
#[test]
fn a_pin_from_before_a_clear_does_not_come_back() {
    let file = file_in_memory();
    let mut random = Random(0);
    let mut process = Process::start(&file, None, u64::MAX);
    process.compute(&mut random);
    process.pool.pin(&process.held[0]).unwrap();
    process.release(&mut random);
    process.clear(&mut random);
    assert_ne!(process.pool.stats().pinned, 0);
    check_restart(process, &file, "a pin and a clear");
}

/// Ends a process well, in which nothing is in use: the next one has its line, and reports what stands there.
fn check_restart(process: Process, file: &File, life: &str) {
    while process.file.table().complete_next() {}
    let before = line(&process.pool);
    drop(process.file);
    let next = Process::start(file, None, u64::MAX);
    assert_eq!(before, line(&next.pool), "{life}");
    next.pool.validate().unwrap();
    let reported: HashSet<ShortHash> = next.reported.iter().map(|&(name, _)| name).collect();
    let keys = before.iter().map(|(_, key, ..)| key);
    let open = keys.filter(|key| tokens_of(number(key)).is_some());
    let expected = open.map(|key| (&key.hash).into()).collect();
    assert_eq!(reported, expected, "{life}");
}

/// The cached blocks in the order of eviction, with their keys and priorities, and whether they are pinned.
fn line(pool: &Writer) -> Vec<(BlockId, BlockKey, Band, bool)> {
    let cached: HashSet<BlockId> = pool.cached_blocks().into_iter().collect();
    let states = pool.reader().map(NUM_BLOCKS, &[]).unwrap().states; // a cell for each block
    let is_pinned = |id: BlockId| states[id.index() - 1][BlockState::Pinned as usize] == 1;
    let line = pool.free_order().into_iter();
    line.filter(|id| cached.contains(id))
        .map(|id| (id, pool.key_of(id), pool.held_band(id), is_pinned(id)))
        .collect()
}

#[test]
fn a_file_of_anything_else_is_refused_with_the_reason() {
    let file = file_in_memory();
    drop(Process::start(&file, None, u64::MAX));
    let open = |wanted: &Layout| KvFile::open(file.try_clone().unwrap(), wanted);
    let refused = |wanted: &Layout| open(wanted).unwrap_err().to_string();
    let other = Layout { digest: [8; 32], ..layout() };
    assert!(matches!(open(&other), Err(OpenError::OtherLayout)));
    let larger = Layout { capacity: 13, ..layout() };
    assert!(refused(&larger).contains("room for 12 blocks"));
    let smaller = Layout { capacity: 8, ..layout() };
    assert_eq!(open(&smaller).unwrap().layout().capacity, 12);
    let impossible = Layout { block_bytes: u64::MAX, ..layout() };
    assert!(refused(&impossible).contains("no file can have"));
    let len = file.metadata().unwrap().len();
    file.set_len(len - 1).unwrap();
    assert!(refused(&layout()).contains(&format!("{} bytes", len - 1)));
    file.set_len(len).unwrap();
    file.write_all_at(&(FORMAT_VERSION + 1).to_le_bytes(), 8).unwrap();
    assert!(refused(&layout()).contains("version 4, not 3"));
    file.write_all_at(&FORMAT_VERSION.to_le_bytes(), 8).unwrap();
    file.write_all_at(&[1], 33).unwrap(); // of the capacity
    assert!(matches!(open(&layout()), Err(OpenError::NotOurs)));
    file.set_len(100).unwrap();
    assert!(matches!(describe(&file), Err(OpenError::NotOurs)));
}

#[test]
fn any_bytes_in_the_table_are_at_most_a_cold_start() {
    let file = file_in_memory();
    let mut random = Random(1);
    for _ in seeds(500) {
        let mut process = Process::start(&file, None, u64::MAX);
        process.compute(&mut random);
        while process.file.table().complete_next() {}
        drop(process.file);
        for _ in 0..random.below(20) {
            let at = 8 * (12 + random.below(layout().table_bytes() as u64 / 8 - 12));
            let is_header = at < 4096;
            if !is_header || at < 8 * 14 {
                file.write_all_at(&random.word().to_le_bytes(), at).unwrap();
            }
        }
        let mut next = Process::start(&file, None, u64::MAX);
        let published: HashSet<u64> = next.published.iter().copied().collect();
        next.check_all(&published, true);
        assert_eq!(next.failures, [""; 0]);
    }
}

#[test]
fn the_thread_completes_what_is_published() {
    let file = file_in_memory();
    let kv = KvFile::open(file.try_clone().unwrap(), &layout()).unwrap();
    let store = kv.store();
    store.set_durable(true);
    for block in 1..NUM_BLOCKS as u32 {
        store.published(BlockId::new(block), &key(block.into()));
    }
    drop(store);
    drop(kv); // waits for the thread
    let next = KvFile::open(file, &layout()).unwrap();
    assert_eq!(next.take_kept(NUM_BLOCKS, 1).blocks.len(), NUM_BLOCKS - 1);
    assert_eq!(next.survey(true), (NUM_BLOCKS as u64 - 1, 0));
}

/// A file whose blocks 1 and 2 were published by an earlier process and not read by this one. Block 2 is damaged.
fn restored_pair() -> (File, KvFile) {
    let file = file_in_memory();
    let kv = KvFile::open_without_thread(file.try_clone().unwrap(), &layout()).unwrap();
    kv.store().set_durable(true);
    for block in [1, 2] {
        write_bytes(&file, &kv, block, block.into());
        kv.store().published(BlockId::new(block), &key(block.into()));
    }
    while kv.table().complete_next() {}
    drop(kv);
    let next = KvFile::open_without_thread(file.try_clone().unwrap(), &layout()).unwrap();
    write_bytes(&file, &next, 2, 99);
    assert_eq!(next.take_kept(NUM_BLOCKS, 1).blocks.len(), 2);
    (file, next)
}

fn write_bytes(file: &File, kv: &KvFile, block: u32, number: u64) {
    for tensor in 0..NUM_TENSORS {
        let at = kv.tensor_at(tensor) + u64::from(block) * BLOCK_BYTES;
        file.write_all_at(&bytes_of(number, tensor), at).unwrap();
    }
}

#[test]
fn what_was_found_of_a_block_is_not_taken_for_other_content() {
    for is_sound in [true, false] {
        let (file, kv) = restored_pair();
        let (table, store, block) = (kv.table(), kv.store(), BlockId::new(1));
        let word = table.unread(block);
        // The checksum thread has read block 1 and loses its core. Meanwhile block 2 moves there.
        write_bytes(&file, &kv, 1, 99);
        store.moved(BlockId::new(2), block);
        table.end_check(block, word, is_sound);
        assert_eq!(kv.counts().checked, 0);
        assert!(!store.is_sound(block), "nobody has read what is there now");
        assert_eq!(kv.counts().failed, 1);
    }
}

#[test]
fn a_late_checksum_leaves_a_block_that_moved_there_as_it_is() {
    let (file, kv) = restored_pair();
    let (table, store, block) = (kv.table(), kv.store(), BlockId::new(3));
    write_bytes(&file, &kv, 3, 1);
    store.set_durable(true);
    store.published(block, &key(3));
    let state = table.record(block).state();
    let moves_in = || {
        if table.record(block).state() == state {
            store.moved(BlockId::new(1), block);
        }
        true
    };
    assert!(!table.record(block).complete(block, state, 77, table.seed(), moves_in));
    assert_eq!(kv.survey(true), (2, 1));
}

#[test]
fn blocks_that_a_hit_waits_for_are_read_before_it() {
    let (_file, kv) = restored_pair();
    let (table, store) = (kv.table(), kv.store());
    let blocks = || [1, 2, 3].map(BlockId::new).into_iter();
    assert!(!store.reads_first(&mut blocks(), 2), "a commit may read as many");
    assert!(store.reads_first(&mut blocks().skip(1), 0));
    assert_eq!(kv.num_asked(), 1);
    while table.check_asked() {}
    assert!(!store.reads_first(&mut blocks().skip(1), 0), "nobody waits for a damaged one twice");
    assert!(store.reads_first(&mut blocks(), 0));
    while table.check_asked() {}
    assert_eq!((kv.num_asked(), kv.counts().checked), (0, 1));
    assert_eq!(
        blocks().map(|block| store.is_sound(block)).collect::<Vec<_>>(),
        [true, false, true]
    );
    assert_eq!((kv.counts().checked, kv.counts().failed), (1, 1));
}

#[test]
fn a_damaged_block_that_nobody_has_read_is_not_for_the_tier() {
    for is_evicted in [false, true] {
        let (file, kv) = restored_pair();
        let staging = staging_of(&file, &kv, 1 + usize::from(is_evicted));
        let kept = kv.take_kept(NUM_BLOCKS, 1).blocks;
        let store = kv.store_with(&staging, &kept);
        store.resized(2);
        for KeptBlock { block, band, pinned, .. } in kept {
            store.queued(block, band, pinned);
            if is_evicted {
                store.withdrawn(block);
            }
        }
        assert_eq!((staged(&staging), staging.counts().damaged), (vec![(1, true)], 1));
    }
}

#[test]
fn the_writer_leaves_a_clear_to_the_thread_and_its_failure_is_counted() {
    for fault in [None, Some(Fault::FailedSync)] {
        let (_file, mut kv) = restored_pair();
        kv.table_mut().unwrap().injected.fault = fault;
        kv.store().cleared();
        assert!(kv.table().has_pending());
        kv.table().sync();
        assert!(!kv.table().has_pending());
        assert_eq!(kv.counts().failed_syncs, u64::from(fault.is_some()));
    }
}

#[test]
fn at_the_end_nobody_waits_for_reads() {
    let (_file, kv) = restored_pair();
    let blocks = || [1, 2].map(BlockId::new).into_iter();
    assert!(kv.store().reads_first(&mut blocks(), 0));
    kv.table().stopped.store(true, Relaxed);
    checker::work(kv.table());
    assert_eq!((kv.num_asked(), kv.counts().checked), (2, 0));
    assert!(!kv.store().reads_first(&mut blocks(), 0), "they would wait for ever");
}
