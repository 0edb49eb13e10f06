//! Hashes are those of the vectors that the readable reference in Python wrote, and the same in whatever
//! steps a sequence grows.

use std::sync::Arc;

use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, PrefixHashes, Scope, root};
use prefixcache_core::id::BlockHash;
use prefixcache_oracle::hashes::block_hashes;
use proptest::collection::vec;
use proptest::prelude::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Vector {
    root: Root,
    tokens: Vec<u32>,
    extras: Vec<String>,
    root_hash: String,
    hashes: Vec<String>,
}

#[derive(Deserialize)]
struct Root {
    model: String,
    revision: String,
    weights: String,
    kv_dtype: String,
    arithmetic: String,
    block_size: usize,
    lora: Option<String>,
    cache_salt: Option<String>,
    groups: Vec<String>,
}

fn vectors() -> Vec<Vector> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/prefix_hashes.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn config(root: &Root) -> HashConfig {
    assert!(root.groups.iter().all(|group| group == "full"));
    let specs = vec![GroupSpec::FullAttention; root.groups.len()];
    HashConfig::new(root.block_size, Groups::new(specs).unwrap())
        .with_model(
            &root.model.clone(),
            &root.kv_dtype.clone(),
            &root.arithmetic.clone(),
        )
        .with_revision(&root.revision.clone())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

#[test]
fn roots_and_blocks_are_those_of_the_reference() {
    let vectors = vectors();
    assert!(vectors.len() > 20);
    for vector in &vectors {
        let scope = Scope {
            lora: vector.root.lora.clone(),
            cache_salt: vector.root.cache_salt.clone(),
        };
        let config = config(&vector.root);
        let root = root(&config, &scope, &vector.root.weights);
        assert_eq!(hex(root.as_bytes()), vector.root_hash);
        let extras = vector.extras.iter().map(|extra| unhex(extra)).collect();
        let mut hashes = PrefixHashes::new(config.block_size, root, Arc::new(extras));
        // In two steps, so that growing is tested with each vector.
        hashes.extend_to(&vector.tokens[..vector.tokens.len() / 2]);
        hashes.extend_to(&vector.tokens);
        let hashes: Vec<String> = hashes
            .as_slice()
            .iter()
            .map(|hash| hex(hash.as_bytes()))
            .collect();
        assert_eq!(hashes, vector.hashes);
    }
}

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
