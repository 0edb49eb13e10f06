//! Bytes as calls of a scheduler, to a cache over the plain pool and to one over a lock-free pool:
//! the same answers, block tables and free order after every call.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prefixcache_core::cache::PrefixCache;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{ChainConfig, Scope};
use prefixcache_core::pool::{BlockPool, Mode, Shared, SingleWriter};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::{BlockStore, PoolConfig};
use prefixcache_oracle::plain::PlainPool;

const BLOCK_SIZE: usize = 4;

fuzz_target!(|input: (u8, Vec<[u8; 3]>)| {
    let (choice, calls) = input;
    let groups = 1 + usize::from(choice >> 1 & 1);
    let config = PoolConfig::new(8 + usize::from(choice >> 2));
    if choice & 1 == 0 {
        run::<Shared>(groups, config, &calls);
    } else {
        run::<SingleWriter>(groups, config, &calls);
    }
});

/// A cache and its requests.
struct Side<S> {
    cache: PrefixCache<S>,
    sequences: Vec<Sequence>,
}

impl<S: BlockStore> Side<S> {
    fn new(groups: usize, store: S) -> Self {
        let config = ChainConfig {
            model: "model".into(),
            revision: String::new(),
            kv_dtype: String::new(),
            block_size: BLOCK_SIZE,
            groups: Groups::new(vec![GroupSpec::FullAttention; groups]).unwrap(),
        };
        Self { cache: PrefixCache::new(config, store).unwrap(), sequences: Vec::new() }
    }

    /// Makes one call, to the request that `a` names; what came back.
    fn call(&mut self, [what, a, b]: [u8; 3]) -> String {
        let cache = &self.cache;
        if what % 8 == 0 || self.sequences.is_empty() {
            // Tokens from a small alphabet, so that requests share prefixes.
            let tokens = (0..b % 40).map(|place| u32::from(a >> (place / 8 % 8) & 1)).collect();
            self.sequences.push(cache.new_sequence(tokens, Scope::default(), Vec::new()));
            return String::new();
        }
        let at = usize::from(a) % self.sequences.len();
        let sequence = &mut self.sequences[at];
        let tokens = sequence.num_tokens();
        match what % 8 {
            1 => {
                let hits = cache.count_prefix_hits(sequence).unwrap();
                let new = tokens - hits + usize::from(b % 3);
                format!("{:?}", cache.commit_prefix_plan(sequence, hits, new))
            }
            2 => format!("{:?}", cache.append_slots(&mut [sequence], &[usize::from(b % 9)])),
            3 => format!("{:?}", cache.append_tokens(&mut [sequence], &[u32::from(b & 1)])),
            4 | 5 => {
                let upto = sequence.num_slots().min(tokens);
                format!("{:?}", cache.mark_blocks_filled(&mut [sequence], &[upto]))
            }
            6 => {
                let outcome = cache.release(&mut [sequence]);
                if outcome.is_ok() && b & 1 == 0 {
                    self.sequences.swap_remove(at);
                }
                format!("{outcome:?}")
            }
            _ => match b % 8 {
                0 => format!("{:?}", cache.clear_cache_index()),
                1 => format!("{:?}", cache.new_weight_version()),
                2 | 3 => format!("{:?}", cache.pin(sequence, tokens / BLOCK_SIZE * BLOCK_SIZE)),
                4 => format!("{:?}", cache.unpin(sequence)),
                5 => format!("{:?}", cache.store().demote(usize::from(b / 8))),
                _ => format!("{:?}", cache.count_prefix_hits(sequence)),
            },
        }
    }

    /// All that can be seen of it.
    fn view(&self) -> String {
        let store = self.cache.store();
        let tables: Vec<_> = self
            .sequences
            .iter()
            .map(|sequence| [sequence.block_table(0), sequence.block_table(1)])
            .collect();
        let pool = (store.free_order(), store.cached_blocks(), store.stats());
        format!("{tables:?} {pool:?} {:?}", self.cache.stats())
    }
}

fn run<M: Mode>(groups: usize, config: PoolConfig, calls: &[[u8; 3]]) {
    let mut plain = Side::new(groups, PlainPool::new(config).unwrap());
    let mut tested = Side::new(groups, BlockPool::<M>::with_ring_capacity(config, 512).unwrap());
    for &call in calls {
        assert_eq!(tested.call(call), plain.call(call), "{call:?} came to something else");
        assert_eq!(tested.view(), plain.view(), "after {call:?}");
        tested.cache.validate().expect("the cache is whole");
    }
}
