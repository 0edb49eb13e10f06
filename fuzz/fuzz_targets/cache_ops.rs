//! Bytes as calls of a scheduler, to a cache over the plain pool and to one over a lock-free pool:
//! the same answers, hits, block tables and free order after every call.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{Extras, HashConfig, Scope};
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::id::{BlockId, GroupId};
use prefixcache_core::pool::{Mode, Shared, SingleWriter, Writer};
use prefixcache_core::retention::RetentionTable;
use prefixcache_core::sequence::Sequence;
use prefixcache_core::sequence::retention::{Pins, Retention};
use prefixcache_core::store::{BlockKey, BlockStore, Moves, PoolConfig};
use prefixcache_oracle::plain::PlainPool;
use prefixcache_oracle::plain_retention::{Hinting, PlainRetention};

const BLOCK_SIZE: usize = 4;

/// Blocks that the pool may grow by.
const ROOM: usize = 16;

fuzz_target!(|input: (u8, Vec<[u8; 3]>)| {
    let (choice, calls) = input;
    let window = |window| GroupSpec::SlidingWindow { window };
    let full = GroupSpec::FullAttention;
    let groups =
        [vec![full], vec![full, window(7)], vec![window(1), full, window(16)], vec![window(9)]];
    let groups = Groups::new(groups[usize::from(choice >> 1 & 3)].clone()).unwrap();
    let num_blocks = 8 + usize::from(choice >> 3) * 3;
    let config = PoolConfig::new(num_blocks).with_max_blocks(num_blocks + ROOM);
    if choice & 1 == 0 {
        run::<Shared>(groups, config, &calls);
    } else {
        run::<SingleWriter>(groups, config, &calls);
    }
});

/// A cache and its requests.
struct Side<S, H> {
    cache: PrefixCache<S>,
    table: H,
    /// Milliseconds.
    time: u64,
    sequences: Vec<Sequence>,
    moves: Moves,
}

impl<S: BlockStore, H: Hinting> Side<S, H> {
    fn new(groups: Groups, store: S, table: H) -> Self {
        let config = HashConfig::new(BLOCK_SIZE, groups).with_model("model", "", "");
        Self {
            cache: PrefixCache::new(config, store).unwrap(),
            table,
            time: 0,
            sequences: Vec::new(),
            moves: Moves::default(),
        }
    }

    /// A request of tokens from a small alphabet, so that requests share prefixes; most are of one scope
    /// and without extras.
    fn new_sequence(&self, [what, a, b]: [u8; 3]) -> Sequence {
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

    /// Makes one call, to the request that `a` names; what came back.
    fn call(&mut self, [what, a, b]: [u8; 3]) -> String {
        if what % 10 == 0 || self.sequences.is_empty() {
            self.sequences.push(self.new_sequence([what, a, b]));
            return String::new();
        }
        let cache = &mut self.cache;
        let at = usize::from(a) % self.sequences.len();
        let sequence = &mut self.sequences[at];
        let tokens = sequence.num_tokens();
        match what % 10 {
            1 => {
                let hits = cache.count_prefix_hits(sequence).unwrap();
                let new = tokens - hits + usize::from(b % 3);
                let chunk = 1 + usize::from(b >> 4);
                let taken = cache.commit_in_chunks(sequence, hits, new, chunk);
                if let Ok(Some(_)) = taken {
                    self.table.note_hits(cache.store_mut(), sequence);
                }
                format!("{taken:?}")
            }
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
                let pinned = cache.pin_anchors(&[&mut *sequence]);
                self.table.keep(cache.store_mut(), sequence);
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
                let hash = sequence.hashes().get(index);
                let hits = hash.and_then(|&hash| cache.store().lookup(&BlockKey::new(hash, group)));
                // Now and then a block that does not hit.
                let block =
                    hits.filter(|_| b & 0x70 != 0).unwrap_or(BlockId::new(u32::from(b & 7)));
                format!("{:?}", cache.replace_block(sequence, group, index, block))
            }
            8 if a & 3 == 0 => {
                let most = cache.store().num_blocks() + ROOM;
                format!("{:?}", cache.resize(usize::from(b) % most))
            }
            9 if a & 12 == 12 => {
                self.time += u64::from(b >> 3) * 100;
                cache.store_mut().set_time(Duration::from_millis(self.time));
                format!("{}", self.table.demote_expired(cache.store_mut(), usize::from(b & 7)))
            }
            9 if a & 4 == 4 => {
                sequence.set_hints(hints(a, b));
                String::new()
            }
            8 if a & 3 == 1 => {
                let most = cache.store().num_blocks() + 1;
                let begun = cache.begin_moves(usize::from(b) % most, 4, &mut self.moves);
                format!("{begun:?} {:?}", self.moves.in_flight)
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
                5 => format!("{:?}", cache.store_mut().demote(usize::from(b / 8))),
                _ => format!(
                    "{:?} {:?}",
                    cache.count_prefix_hits(sequence),
                    cache.count_whole_hits(sequence, usize::from(b)),
                ),
            },
        }
    }

    /// How much of two prompts hits.
    fn hits(&self) -> [usize; 2] {
        [0, 1].map(|token| {
            let hashes =
                self.cache.compute_block_hashes(&[token; 39], &Scope::default(), Vec::new());
            self.cache.probe(&hashes)
        })
    }

    /// All that can be seen of it.
    fn view(&self) -> String {
        let store = self.cache.store();
        let tables: Vec<_> = self
            .sequences
            .iter()
            .map(|sequence| [0, 1, 2].map(|group| sequence.block_table(group)))
            .collect();
        let pool = (store.free_order(), store.cached_blocks(), store.stats());
        let stats = (self.cache.stats(), self.table.stats());
        format!("{:?} {tables:?} {pool:?} {stats:?}", self.hits())
    }
}

/// One range of a few blocks and one up to the end, of one of three owners.
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
    Hints::new(Owner::named(["", "a", "b"][usize::from(a) % 3]), ranges).unwrap()
}

/// Of the pool's blocks, for each owner.
const SHARE: f64 = 0.3;

fn run<M: Mode>(groups: Groups, config: PoolConfig, calls: &[[u8; 3]]) {
    let mut plain = {
        let table = PlainRetention::new(groups.clone(), BLOCK_SIZE, SHARE);
        Side::new(groups.clone(), PlainPool::new(config).unwrap(), table)
    };
    let mut tested = {
        let mut pool = Writer::<M>::with_ring_capacity(config, 512).unwrap();
        pool.set_time(Duration::ZERO);
        Side::new(groups, pool, RetentionTable::new(SHARE).unwrap())
    };
    for &call in calls {
        assert_eq!(tested.call(call), plain.call(call), "{call:?} came to something else");
        assert_eq!(tested.view(), plain.view(), "after {call:?}");
        tested.cache.validate().expect("the cache is whole");
    }
}
