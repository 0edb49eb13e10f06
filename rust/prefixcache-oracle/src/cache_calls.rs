//! A scheduler's calls to two caches, one over the plain pool and one over a pool that ships: the same answers,
//! hits, block tables and free order after each.
//!
//! Calls are made of three bytes, so that a random test, a fuzzer and a person can all write them.

use std::time::Duration;

use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::Groups;
use prefixcache_core::hash::{Extras, HashConfig, Scope};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::id::GroupId;
use prefixcache_core::retention::RetentionTable;
use prefixcache_core::sequence::Sequence;
use prefixcache_core::sequence::retention::{Pins, Retention};
use prefixcache_core::store::sealed::Inner;
use prefixcache_core::store::{BlockStore, Moves, PoolConfig};
use prefixcache_core::weights::WeightsName;

use crate::plain::PlainPool;
use crate::plain_retention::{Hinting, PlainRetention};
use crate::pools::Tested;

/// Tokens in a block.
pub const BLOCK_SIZE: usize = 4;

/// Blocks that a resize may ask for beyond those that there are.
pub const ROOM: usize = 16;

/// Of the pool's blocks, for each owner of hints.
const SHARE: f64 = 0.3;

/// One call: what to do, and two numbers that say to what. The last digit of the first decides, but for the numbers
/// below, each of which stands for several calls.
pub type Call = [u8; 3];

/// One or two new requests with one prompt take their hits, and slots for the rest.
pub const SERVE: u8 = 250;
/// A new request is computed to its end, a chunk at a time.
pub const SERVE_IN_CHUNKS: u8 = 251;
/// A request publishes all that it has, is released and forgotten.
pub const FINISH: u8 = 252;
/// All slices of a shrink, and the resize if nothing above is held. Or a resize to a greater size.
pub const SHRINK: u8 = 253;
/// Weights of one of two names.
pub const NEW_WEIGHTS: u8 = 254;
/// Blocks for the snapshots of a request's states.
pub const KEEP_SNAPSHOTS: u8 = 255;

/// Whether content may be lost out of order after the call: an unpin, or a resize by ids.
#[must_use]
pub fn ends_order([what, a, b]: Call) -> bool {
    what < SERVE && (what % 10 == 8 && a & 3 == 0 || what % 10 == 9 && a & 4 == 0 && b % 8 == 4)
}

/// A cache and its requests.
struct Driver<S, H> {
    cache: PrefixCache<S>,
    table: H,
    millis: u64,
    sequences: Vec<Sequence>,
    moves: Moves,
    /// Whether requests have hints, which need one writer.
    has_hints: bool,
}

impl<S: BlockStore, H: Hinting> Driver<S, H> {
    fn new(groups: &Groups, store: S, table: H, has_hints: bool) -> Self {
        let config = HashConfig::new(BLOCK_SIZE, groups.clone()).with_model("model", "", "");
        let cache = PrefixCache::new(config, store).expect("the block size is a power of two");
        let (sequences, moves) = (Vec::new(), Moves::default());
        Self { cache, table, millis: 0, sequences, moves, has_hints }
    }

    fn pass(&mut self, millis: u64) {
        self.millis += millis;
        self.cache.set_time(Duration::from_millis(self.millis));
    }

    /// A request of tokens from a small alphabet, so that requests share prefixes; most are without extras.
    fn new_sequence(&self, [what, a, b]: Call) -> Sequence {
        let scope = Scope {
            lora: (what & 0xc0 == 0xc0).then(|| "adapter".into()),
            cache_salt: [None, None, Some(String::new()), Some("salt".into())]
                [usize::from(what >> 4 & 3)]
            .clone(),
        };
        let extras: Extras = if a & 0xe0 == 0xe0 { vec![vec![], vec![b]] } else { vec![] };
        let tokens = (0..b % 40).map(|place| u32::from(a >> (place / 8 % 8) & 1)).collect();
        self.cache.new_sequence(tokens, scope, extras)
    }

    /// Makes one call; what came back.
    fn call(&mut self, [what, a, b]: Call) -> String {
        self.pass(100);
        let most = self.cache.store().num_blocks() + ROOM;
        match what {
            SERVE => self.serve(a, b),
            SERVE_IN_CHUNKS => self.serve_in_chunks(a, b),
            SHRINK => self.shrink(usize::from(b) % most),
            NEW_WEIGHTS => {
                let name = WeightsName::new(if a & 1 == 0 { "tag:even" } else { "tag:odd" });
                format!("{:?}", self.cache.new_weight_version(name.ok()))
            }
            _ if what % 10 == 0 || self.sequences.is_empty() => {
                self.sequences.push(self.new_sequence([what, a, b]));
                String::new()
            }
            _ => self.call_for(usize::from(a) % self.sequences.len(), [what, a, b]),
        }
    }

    fn serve(&mut self, a: u8, b: u8) -> String {
        let what = if a < 192 { 0 } else { 0x30 };
        let mut serve = |_| {
            self.sequences.push(self.new_sequence([what, a, b]));
            self.commit(self.sequences.len() - 1, 1, usize::MAX)
        };
        (0..=b >> 7).map(&mut serve).collect()
    }

    fn commit(&mut self, at: usize, more: usize, chunk: usize) -> String {
        let sequence = &mut self.sequences[at];
        let hits = self.cache.count_prefix_hits(sequence).expect("it is of this cache");
        let new = sequence.num_tokens() - hits + more;
        let taken = self.cache.commit_in_chunks(sequence, hits, new, chunk);
        if let Ok(Some(_)) = taken {
            self.table.note_hits(self.cache.inner_mut(), sequence);
        }
        format!("{hits} {taken:?}")
    }

    fn serve_in_chunks(&mut self, a: u8, b: u8) -> String {
        let Self { cache, table, .. } = self;
        let (len, chunk) = (1 + usize::from(b % 40), 1 + usize::from(b % 9));
        let tokens = (0..len).map(|place| u32::from(a >> (place / 8) & 1)).collect();
        let mut sequence = cache.new_sequence(tokens, Scope::default(), vec![]);
        sequence.set_retention(Retention::Anchors { interval: 0, pins: Some(Pins::new(2, true)) });
        sequence.add_prompt_end(len - 1);
        let hits = cache.count_prefix_hits_within(&mut sequence, len - 1);
        let hits = hits.expect("it is of this cache");
        let plan = cache.commit_in_chunks(&mut sequence, hits, len - hits, chunk);
        let mut answers = format!("{hits} {plan:?}");
        let Ok(Some(mut computed)) = plan else { return answers };
        table.note_hits(cache.inner_mut(), &sequence);
        while computed < len {
            let upto = len.min(computed + chunk);
            let batch = &mut [&mut sequence];
            let dropped = cache.drop_unneeded(batch, &[computed]);
            if cache.ensure_slots(batch, &[upto]) != Ok(1) {
                break;
            }
            let kept = cache.keep_snapshots(batch, &[computed]);
            let duplicates = cache.mark_blocks_filled(batch, &[upto]);
            answers += &format!("{dropped:?} {kept:?} {duplicates:?}");
            let snapshots = kept.map_or(0, |kept| kept * sequence.num_groups());
            let (held, most) = (num_held(&sequence), cache.most_blocks(len, chunk));
            assert!(held <= most + snapshots, "{held} blocks are held, {most} were promised");
            computed = upto;
        }
        self.sequences.push(sequence);
        answers
    }

    fn shrink(&mut self, num_blocks: usize) -> String {
        let mut answers = String::new();
        loop {
            let finished = self.cache.finish_moves(&mut self.moves);
            let begun = self.cache.begin_moves(num_blocks, 3, &mut self.moves);
            answers += &format!("{finished:?} {begun:?} {:?}", self.moves.in_flight());
            if self.moves.in_flight().is_empty() {
                let waits = begun.is_ok() && self.cache.store().stats().held_above > 0;
                let resized = (!waits).then(|| self.cache.resize(num_blocks));
                return format!("{answers} {resized:?}");
            }
        }
    }

    /// Makes one call to a request.
    fn call_for(&mut self, at: usize, [what, a, b]: Call) -> String {
        let cache = &mut self.cache;
        let sequence = &mut self.sequences[at];
        let tokens = sequence.num_tokens();
        match what % 10 {
            _ if what == FINISH => {
                let filled = self.call_for(at, [5, a, b]);
                filled + &self.call_for(at, [6, a, 0])
            }
            _ if what == KEEP_SNAPSHOTS => {
                format!("{:?}", cache.keep_snapshots(&mut [sequence], &[usize::from(b % 40)]))
            }
            1 => self.commit(at, usize::from(b % 3), 1 + usize::from(b >> 4)),
            2 if b & 64 == 0 => {
                format!("{:?}", cache.append_slots(&mut [sequence], &[usize::from(b % 9)]))
            }
            2 => {
                let upto = sequence.num_ready_slots() + usize::from(b % 9);
                format!("{:?}", cache.ensure_slots(&mut [sequence], &[upto]))
            }
            4 if b & 1 == 0 => {
                let upto = sequence.num_filled();
                format!("{:?}", cache.drop_unneeded(&mut [sequence], &[upto]))
            }
            3 => format!("{:?}", cache.append_tokens(&mut [sequence], &[u32::from(b & 1)])),
            4 | 5 => {
                let upto = sequence.num_ready_slots().min(tokens);
                format!("{:?}", cache.mark_blocks_filled(&mut [sequence], &[upto]))
            }
            6 => {
                let pinned = cache.pin_anchors(&[&*sequence]);
                self.table.keep(cache.inner_mut(), sequence);
                let outcome = cache.release(&mut [sequence]);
                if outcome.is_ok() && b & 1 == 0 {
                    self.sequences.swap_remove(at);
                }
                format!("{pinned:?} {outcome:?}")
            }
            7 if b & 8 == 0 => {
                let pins = (b & 1 == 0).then_some(Pins::new(2, b & 2 == 0));
                let interval = usize::from(b >> 4);
                sequence.set_retention(Retention::Anchors { interval, pins });
                sequence.add_anchor(usize::from(a ^ b) % 48);
                String::new()
            }
            7 => {
                let (group, index) = (GroupId::new(u16::from(b >> 7)), usize::from(b & 7));
                format!("{:?}", cache.replace_block(sequence, group, index))
            }
            8 if a & 3 == 0 => {
                let most = cache.store().num_blocks() + ROOM;
                format!("{:?}", cache.resize(usize::from(b) % most))
            }
            9 if a & 12 == 12 => {
                self.pass(u64::from(b >> 3) * 100);
                let moved = self.table.demote_expired(self.cache.inner_mut(), usize::from(b & 7));
                format!("{moved}")
            }
            9 if a & 4 == 4 => {
                if self.has_hints {
                    sequence.set_hints(hints(a, b));
                }
                String::new()
            }
            8 if a & 3 == 1 => {
                let most = cache.store().num_blocks() + 1;
                let begun = cache.begin_moves(usize::from(b) % most, 4, &mut self.moves);
                format!("{begun:?} {:?}", self.moves.in_flight())
            }
            8 if a & 3 == 2 && b & 1 == 0 => format!("{:?}", cache.finish_moves(&mut self.moves)),
            8 if a & 3 == 2 => format!("{:?}", cache.abort_moves(&mut self.moves)),
            8 if b & 1 == 0 => format!("{:?}", cache.release_cached(usize::from(b >> 4))),
            8 => {
                let bound = usize::from(b >> 2);
                format!("{:?}", cache.set_max_cached((bound < 48).then_some(bound)))
            }
            _ => match b % 8 {
                0 => format!("{:?}", cache.clear_cache_index()),
                1 => format!("{:?}", cache.new_weight_version(None)),
                2 | 3 => format!("{:?}", cache.pin(sequence, tokens / BLOCK_SIZE * BLOCK_SIZE)),
                4 => format!("{:?}", cache.unpin(sequence)),
                5 => format!("{:?}", cache.demote(usize::from(b / 8))),
                _ => format!(
                    "{:?} {:?}",
                    cache.count_prefix_hits(sequence),
                    cache.count_whole_hits(sequence, usize::from(b)),
                ),
            },
        }
    }

    /// How much of two prompts hits, by whatever way the cache counts.
    fn hits(&self) -> [usize; 2] {
        [0, 1].map(|token| {
            let hashes =
                self.cache.compute_block_hashes(&[token; 39], &Scope::default(), Vec::new());
            self.cache.probe(&hashes)
        })
    }

    /// All that can be seen of it. Panics where it is broken.
    fn view(&self) -> String {
        let live: Vec<&Sequence> = self.sequences.iter().collect();
        self.cache.validate().expect("the cache is whole");
        self.cache.validate_holds(&live, &self.moves).expect("each block counts its holders");
        let groups = 0..usize::from(self.cache.num_groups());
        let tables: Vec<_> =
            groups.flat_map(|group| live.iter().map(move |one| one.block_table(group))).collect();
        let store = self.cache.store();
        let pool = (store.free_order(), store.cached_blocks(), store.stats());
        let stats = (self.cache.stats(), self.table.stats());
        format!("{:?} {tables:?} {pool:?} {stats:?}", self.hits())
    }
}

fn num_held(sequence: &Sequence) -> usize {
    let tables = (0..sequence.num_groups()).flat_map(|group| sequence.block_table(group));
    tables.filter(|block| !block.is_null()).count()
}

/// One range of a few blocks and one up to the end, of one of more owners than a block may have.
fn hints(a: u8, b: u8) -> Hints {
    let range = |start, end, priority: u8, seconds: u8| Hint {
        start,
        end,
        priority: priority % 101,
        ttl: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
    };
    let cut = 1 + usize::from(b % 24);
    let first = range(0, Some(cut), a.wrapping_mul(7), b & 3);
    let second = range(cut + usize::from(a >> 6), None, b.wrapping_mul(11), a >> 6);
    let ranges = if b & 64 == 0 { vec![first] } else { vec![first, second] };
    let owner = Owner::named(&(a % 6).to_string());
    Hints::new(owner, ranges).expect("the ranges are apart")
}

/// Makes calls to a cache over a plain pool and to one over `pool`, which has the same configuration and has not been
/// used, and shows the second to `look` after each. Panics where they differ or where one of them is broken.
pub fn assert_same_as_plain<P: Tested>(
    groups: &Groups,
    config: PoolConfig,
    pool: P,
    calls: &[Call],
    mut look: impl FnMut(&PrefixCache<P>, &[Sequence]),
) {
    let plain = PlainPool::new(config).expect("the configuration was accepted before");
    let table = PlainRetention::new(groups.clone(), BLOCK_SIZE, SHARE);
    let mut plain = Driver::new(groups, plain, table, P::HAS_HINTS);
    let table = RetentionTable::new(SHARE).expect("it is a share");
    let mut tested = Driver::new(groups, pool, table, P::HAS_HINTS);
    for &call in calls {
        assert_eq!(tested.call(call), plain.call(call), "{call:?} came to something else");
        assert_eq!(tested.view(), plain.view(), "after {call:?}");
        look(&tested.cache, &tested.sequences);
    }
}
