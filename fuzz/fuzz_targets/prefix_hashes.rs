//! The hashes of a sequence that grows in any steps, next to an oracle that hashes everything from the start.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use prefixcache_core::hash::PrefixHashes;
use prefixcache_core::id::BlockHash;
use prefixcache_oracle::hashes::block_hashes;

type Input = (u8, [u8; 32], Vec<u32>, Vec<Vec<u8>>, Vec<u8>);

fuzz_target!(|input: Input| {
    let (size, root, tokens, extras, cuts) = input;
    let size = 1_usize << (size % 9);
    let root = BlockHash::from_bytes(root);
    let mut hashes = PrefixHashes::new(size, root, Arc::new(extras.clone()));
    let mut known = 0;
    for cut in cuts {
        known = (known + usize::from(cut)).min(tokens.len());
        hashes.extend_to(&tokens[..known]);
        assert_eq!(hashes.as_slice().len(), known / size);
    }
    hashes.extend_to(&tokens);
    assert_eq!(hashes.as_slice(), block_hashes(size, root, &tokens, &extras));
});
