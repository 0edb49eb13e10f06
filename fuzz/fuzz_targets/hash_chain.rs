//! The hash chain, grown in any steps, beside one that hashes everything anew in the obvious way.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use prefixcache_core::hash::HashChain;
use prefixcache_core::id::BlockHash;

type Input = (u8, [u8; 32], Vec<u32>, Vec<Vec<u8>>, Vec<u8>);

fuzz_target!(|input: Input| {
    let (size, root, tokens, extras, cuts) = input;
    let size = 1_usize << (size % 9);
    let root = BlockHash::from_bytes(root);
    let mut chain = HashChain::new(size, root, Arc::new(extras.clone()));
    let mut known = 0;
    for cut in cuts {
        known = (known + usize::from(cut)).min(tokens.len());
        chain.extend_to(&tokens[..known]);
        assert_eq!(chain.hashes().len(), known / size);
    }
    chain.extend_to(&tokens);
    assert_eq!(chain.hashes(), obvious_chain(size, root, &tokens, &extras));
});

fn obvious_chain(
    size: usize,
    root: BlockHash,
    tokens: &[u32],
    extras: &[Vec<u8>],
) -> Vec<BlockHash> {
    let mut hashes = Vec::new();
    let mut parent = root;
    for (index, block) in tokens.chunks_exact(size).enumerate() {
        let mut message: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
        if let Some(extra) = extras.get(index).filter(|extra| !extra.is_empty()) {
            message.extend((extra.len() as u64).to_le_bytes());
            message.extend(extra);
        }
        parent = BlockHash::from_bytes(blake3::keyed_hash(parent.as_bytes(), &message).into());
        hashes.push(parent);
    }
    hashes
}
