//! One script, two pools: the plain one and one that ships, compared after every step.
//!
//! Steps are made of three bytes, so that a random test, a fuzzer and a person can all write them.

use std::collections::HashMap;
use std::time::Duration;

use crate::plain::PlainPool;
use crate::pools::{Tested, Watched};
use prefixcache_core::band::Band;
use prefixcache_core::id::{BlockHash, BlockId, BlockKey, Epoch, GroupId};
use prefixcache_core::policy::{EvictionPolicy, Queue, ReuseQueue, Turn};
use prefixcache_core::store::{BlockStore, FreeOrder, Lookup, Moves, PoolConfig};

/// Keys that a script can name.
const KEYS: u8 = 48;

/// Evictions that a listener's log holds: more than any step has.
const LOG: usize = 256;

/// One step: what to do, and two numbers that say to what.
pub type Step = [u8; 3];

/// The sizes that a script starts with.
#[must_use]
pub fn config(
    max_blocks: usize,
    free_order: FreeOrder,
    eviction_policy: EvictionPolicy,
) -> PoolConfig {
    PoolConfig::new(max_blocks - max_blocks / 4)
        .with_max_blocks(max_blocks)
        .with_free_order(free_order)
        .with_eviction_policy(eviction_policy)
}

fn key(number: u8) -> BlockKey {
    let number = number % KEYS;
    let mut hash = [0; 32];
    hash[usize::from(number) % 32] = 1 + number / 2;
    BlockKey::new(BlockHash::from_bytes(hash), GroupId::new(u16::from(number & 1)))
}

/// A run of keys, as a request would ask for.
fn keys(first: u8, count: u8) -> Vec<BlockKey> {
    (0..count).map(|step| key(first.wrapping_add(2 * step))).collect()
}

/// What one request holds, in the order in which it got it.
#[derive(Clone, Debug, Default)]
struct Request {
    blocks: Vec<BlockId>,
    epoch: Epoch,
}

/// The holds that a script has: the same for every pool that it drives.
#[derive(Debug, Default)]
struct Script {
    requests: Vec<Request>,
    /// Blocks that content is being moved to.
    moving: Vec<BlockId>,
    /// Milliseconds since the script began.
    time: u64,
    /// Whether steps give bands.
    gives_bands: bool,
}

impl Script {
    fn request(&self, number: u8) -> Option<usize> {
        let count = self.requests.len();
        (count > 0).then(|| usize::from(number) % count)
    }

    /// Every hold, those of moves too.
    fn holds(&self) -> Vec<BlockId> {
        let held = self.requests.iter().flat_map(|request| &request.blocks);
        held.chain(&self.moving).copied().collect()
    }

    fn blocks(&self, number: u8) -> Vec<BlockId> {
        self.request(number).map(|at| self.requests[at].blocks.clone()).unwrap_or_default()
    }

    /// A block that a request holds, and the epoch in which it got it.
    fn block(&self, a: u8, b: u8) -> Option<(BlockId, Epoch)> {
        let request = &self.requests[self.request(a)?];
        let at = usize::from(b) % request.blocks.len().max(1);
        Some((*request.blocks.get(at)?, request.epoch))
    }

    /// Does one step to `pool`; what came back, and the holds that were taken.
    fn apply(
        &self,
        pool: &mut impl BlockStore,
        mover: &mut Mover,
        [what, a, b]: Step,
    ) -> (String, Option<Request>) {
        if let Some(reuse) = pool.reuse_queue() {
            self.inform(reuse, [what, a, b]);
        }
        let mut out = Vec::new();
        let mut taken = None;
        let outcome = match what % 16 {
            0..4 => {
                let epoch = pool.epoch();
                let outcome =
                    pool.commit(keys(a, b % 9).into_iter(), usize::from(b / 9) % 9, &mut out);
                taken = outcome.is_ok().then(|| Request { blocks: out.clone(), epoch });
                format!("{outcome:?} {out:?}")
            }
            4..8 => match self.block(a, b) {
                None => "nothing held".into(),
                Some((block, epoch)) => {
                    pool.begin_registrations();
                    format!("{:?}", pool.register(block, key(a ^ b.rotate_left(3)), epoch))
                }
            },
            8..11 => {
                let mut blocks = self.blocks(a);
                blocks.reverse();
                // Now and then as what stands behind a window.
                let outcome = if b & 3 == 0 {
                    pool.release_unneeded(&blocks)
                } else if b & 3 == 1 {
                    pool.release_to(&blocks, Queue::new(b / 4 % Queue::COUNT as u8))
                } else {
                    pool.release(&blocks)
                };
                format!("{outcome:?}")
            }
            11 => format!("{:?}", pool.pin(&self.blocks(a))),
            12 if b & 1 == 0 => format!("{:?}", pool.unpin(&self.blocks(a))),
            12 if self.gives_bands => {
                let key = key(a);
                let held = self.block(b, b).map_or(BlockId::NULL, |(block, _)| block);
                let band = Band::all().nth(usize::from(b >> 2) % Band::COUNT).unwrap_or_default();
                format!("{:?} {}", pool.band(&key), pool.set_band(&key, held, band))
            }
            13 if a >= 128 => mover.shrink(pool, a, usize::from(b) % 44),
            13 => format!("{:?}", pool.demote(usize::from(a % 8))),
            14 if a < 64 => format!("{:?}", pool.clear_index()),
            14 if a < 96 => format!("{:?}", pool.release_cached(usize::from(b % 8))),
            14 if a < 128 => {
                let bound = (b < 128).then_some(usize::from(b) % 24);
                format!("{:?}", pool.set_max_cached(bound))
            }
            14 => format!("{:?}", pool.resize(usize::from(b) % 44)),
            12 => "no bands".into(),
            _ => format!("{:?}", pool.release(&self.bad_blocks(a, b))),
        };
        (outcome, taken)
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.time)
    }

    /// Tells the eviction policy what a cache would.
    fn inform(&self, reuse: &ReuseQueue, [what, a, b]: Step) {
        // Names that differ in all bytes.
        let hashes: Vec<BlockHash> = (a..=a.saturating_add(b % 9))
            .map(|number| BlockHash::from_bytes([(number % KEYS).wrapping_mul(37); 32]))
            .collect();
        match what % 16 {
            0..4 => drop(reuse.begin(&hashes)),
            8..11 => reuse.end(&hashes, Turn::FIRST, 2, usize::from(b % 3)),
            _ => {}
        }
    }

    /// Blocks of which at least one cannot be released: the last of a request is named twice more
    /// than it is held, or is nobody's.
    fn bad_blocks(&self, a: u8, b: u8) -> Vec<BlockId> {
        let held =
            |block| self.requests.iter().flat_map(|r| &r.blocks).filter(|&&h| h == block).count();
        let wrong = match b % 3 {
            0 => BlockId::NULL,
            1 => BlockId::new(u32::MAX),
            _ => BlockId::new(u32::from(b)),
        };
        let wrong = if self.moving.contains(&wrong) { BlockId::NULL } else { wrong };
        let repeats = if held(wrong) > 0 { held(wrong) + 1 } else { 1 };
        self.blocks(a)
            .into_iter()
            .filter(|&block| block != wrong)
            .take(2)
            .chain(std::iter::repeat_n(wrong, repeats))
            .collect()
    }

    /// Keeps the books after a step.
    fn settle(&mut self, [what, a, b]: Step, taken: Option<Request>) {
        self.time += u64::from(a ^ b) * 10;
        self.requests.extend(taken);
        match what % 16 {
            8..11 => {
                if let Some(at) = self.request(a) {
                    self.requests.swap_remove(at);
                }
            }
            15 => {
                // All but the last were released.
                let mut bad = self.bad_blocks(a, b);
                bad.pop();
                bad.into_iter().for_each(|block| self.drop_hold(block));
            }
            _ => {}
        }
    }

    fn drop_hold(&mut self, block: BlockId) {
        let found = self.requests.iter_mut().find_map(|request| {
            let at = request.blocks.iter().position(|&held| held == block)?;
            Some(request.blocks.remove(at))
        });
        assert_eq!(found, Some(block));
    }
}

/// What a caller does whose pool shrinks.
#[derive(Debug, Default)]
struct Mover {
    moves: Moves,
    /// What it has copied, from block to block.
    copied: Vec<(BlockId, BlockId)>,
}

impl Mover {
    /// A part of a slice of a shrink, or all slices that it takes.
    fn shrink(&mut self, pool: &mut impl BlockStore, a: u8, num_blocks: usize) -> String {
        let most = usize::from(a % 5);
        match a / 8 % 4 {
            0 => format!("{:?}", pool.finish_moves(&mut self.moves)),
            1 => format!("{:?}", pool.abort_moves(&mut self.moves)),
            2 => self.begin(pool, num_blocks, most),
            _ => {
                let mut story = format!("{:?}", pool.finish_moves(&mut self.moves));
                loop {
                    story += &self.begin(pool, num_blocks, most + 1);
                    if self.moves.in_flight().is_empty() {
                        return format!("{story} {:?}", pool.resize(num_blocks));
                    }
                    story += &format!(" {:?} ", pool.finish_moves(&mut self.moves));
                }
            }
        }
    }

    fn begin(&mut self, pool: &mut impl BlockStore, num_blocks: usize, most: usize) -> String {
        let outcome = pool.begin_moves(num_blocks, most, &mut self.moves);
        if outcome.is_ok() {
            let copies = self.moves.in_flight().iter().map(|one| (one.from, one.to));
            self.copied.extend(copies);
        }
        format!("{outcome:?} {:?}", self.moves.in_flight())
    }

    /// The blocks that content is being moved to.
    fn held(&self) -> Vec<BlockId> {
        self.moves.in_flight().iter().map(|one| one.to).collect()
    }
}

/// Runs a script on a plain pool and on `pool`, which has the same configuration and has not been
/// used. Panics where they differ or where one of them is broken.
pub fn assert_same_as_plain<P: Tested>(config: PoolConfig, pool: &mut P, steps: &[Step]) {
    let mut plain = PlainPool::new(config).expect("the configuration was accepted before");
    let mut script = Script { gives_bands: P::HAS_HINTS, ..Script::default() };
    let (mut mover, mut plain_mover) = (Mover::default(), Mover::default());
    // Half of the scripts run without a listener.
    if steps.len() % 2 == 1 {
        // A registration has the time that was set for the batch before it.
        pool.set_time(script.now());
        plain.listen();
        pool.reader().evictions().listen(LOG, &[]).expect("nobody listens yet");
    }
    for &step in steps {
        plain.set_time(script.now());
        pool.set_time(script.now());
        let (expected, taken) = script.apply(&mut plain, &mut plain_mover, step);
        let (outcome, _) = script.apply(pool, &mut mover, step);
        assert_eq!(outcome, expected, "{step:?} came to something else");
        assert_same_state(&plain, pool);
        let mut evictions = Vec::new();
        pool.reader().evictions().take(LOG, &mut evictions);
        assert_eq!(evictions, plain.take_evictions(), "the evictions");
        script.settle(step, taken);
        script.moving = mover.held();
        let sound = pool.validate_holds(script.holds());
        sound.expect("each block counts its holders");
    }
}

fn assert_same_state<P: Tested>(plain: &PlainPool, pool: &P) {
    pool.validate().expect("the pool is whole");
    assert_eq!(pool.free_order(), plain.free_order(), "the free order");
    assert_eq!(pool.cached_blocks(), plain.cached_blocks(), "the cached blocks");
    assert_eq!(pool.stats(), plain.stats());
    assert_eq!(pool.num_blocks(), plain.num_blocks());
    assert_eq!(pool.num_free(), plain.num_free());
    assert_same_map(plain, pool);
    for key in (0..KEYS).map(key) {
        assert_eq!(pool.lookup(&key), plain.lookup(&key), "the hit of {key:?}");
    }
}

/// Of as many cells as there are blocks, of fewer that do not divide them, and of one.
fn assert_same_map<P: Tested>(plain: &PlainPool, pool: &P) {
    let ages = [100, 1000, 10_000].map(Duration::from_micros);
    for cells in [1000, 7, 1] {
        let map = pool.reader().map(cells, &ages);
        assert_eq!(map, plain.map(cells, &ages), "the map of {cells} cells");
    }
}

/// Runs a script on a pool whose rings may be too short, so that it may forget content that a plain
/// pool would keep. Panics where the pool is broken, a hit is wrong or a block is handed out twice.
pub fn assert_conserves<P: Tested>(pool: &mut P, steps: &[Step]) {
    let mut script = Script::default();
    let mut contents: HashMap<BlockId, BlockKey> = HashMap::new();
    let mut mover = Mover::default();
    for &step in steps {
        pool.set_time(script.now());
        let (outcome, taken) = script.apply(pool, &mut mover, step);
        if let Some(request) = &taken {
            check_taken(&script, &contents, step, request);
        }
        if outcome.starts_with("Ok(New") || outcome.starts_with("Ok(Duplicate") {
            let [_, a, b] = step;
            let (block, _) = script.block(a, b).expect("it was registered");
            contents.insert(block, key(a ^ b.rotate_left(3)));
        }
        for (from, to) in mover.copied.drain(..) {
            if let Some(&key) = contents.get(&from) {
                contents.insert(to, key);
            }
        }
        script.settle(step, taken);
        script.moving = mover.held();
        pool.validate().expect("the pool is whole");
        let sound = pool.validate_holds(script.holds());
        sound.expect("each block counts its holders");
    }
}

/// Hits hold what they should; the other blocks were nobody's.
fn check_taken(
    script: &Script,
    contents: &HashMap<BlockId, BlockKey>,
    [_, a, b]: Step,
    request: &Request,
) {
    let num_new = usize::from(b / 9) % 9;
    let (hits, new) = request.blocks.split_at(request.blocks.len() - num_new);
    for (hit, key) in hits.iter().zip(keys(a, b % 9)) {
        assert!(contents.get(hit) == Some(&key), "block {hit} is a wrong hit");
    }
    let mut held = script.requests.iter().flat_map(|request| &request.blocks).chain(hits);
    assert!(!held.any(|block| new.contains(block)), "a held block was handed out again");
}
