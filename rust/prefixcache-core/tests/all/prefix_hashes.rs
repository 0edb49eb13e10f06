//! Hashes are those of the oracle, and the same in whatever steps a sequence grows.
//! The vectors that the readable reference in Python wrote are checked by tests/unit/core/test_core_vectors.py.

use std::sync::Arc;

use prefixcache_core::hash::PrefixHashes;
use prefixcache_core::id::BlockHash;
use prefixcache_oracle::hashes::block_hashes;
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #[test]
    fn hashes_are_the_same_in_whatever_steps_a_sequence_grows(
        size in (0..9_u32).prop_map(|power| 1_usize << power),
        roots in any::<[[u8; 32]; 2]>(),
        tokens in vec(any::<u32>(), 0..600),
        extras in vec(vec(any::<u8>(), 0..3), 0..4),
        steps in vec(0..70_usize, 0..12),
    ) {
        let [old, new] = roots.map(BlockHash::from_bytes);
        let mut hashes = PrefixHashes::new(size, old, Arc::new(extras.clone()));
        for (root, restart) in [(old, false), (new, true)] {
            if restart {
                hashes.restart(new);
            }
            let mut known = 0;
            for step in &steps {
                known = (known + step).min(tokens.len());
                hashes.extend_to(&tokens[..known]);
                let expected = block_hashes(size, root, &tokens[..known], &extras);
                prop_assert_eq!(hashes.as_slice(), expected);
            }
        }
    }
}
