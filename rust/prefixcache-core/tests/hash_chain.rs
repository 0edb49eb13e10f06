//! The hash chain reproduces the vectors that the readable reference in Python wrote.

use std::sync::Arc;

use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{ChainConfig, HashChain, Scope, root};
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
    kv_dtype: String,
    block_size: usize,
    lora: Option<String>,
    cache_salt: Option<String>,
    weight_version: u64,
    groups: Vec<String>,
}

fn vectors() -> Vec<Vector> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/hash_chain.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn config(root: &Root) -> ChainConfig {
    assert!(root.groups.iter().all(|group| group == "full"));
    let specs = vec![GroupSpec::FullAttention; root.groups.len()];
    ChainConfig {
        model: root.model.clone(),
        revision: root.revision.clone(),
        kv_dtype: root.kv_dtype.clone(),
        block_size: root.block_size,
        groups: Groups::new(specs).unwrap(),
    }
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
        let root = root(&config, &scope, vector.root.weight_version);
        assert_eq!(hex(root.as_bytes()), vector.root_hash);
        let extras = vector.extras.iter().map(|extra| unhex(extra)).collect();
        let mut chain = HashChain::new(config.block_size, root, Arc::new(extras));
        // In two steps, so that growing is tested with each vector.
        chain.extend_to(&vector.tokens[..vector.tokens.len() / 2]);
        chain.extend_to(&vector.tokens);
        let hashes: Vec<String> = chain
            .hashes()
            .iter()
            .map(|hash| hex(hash.as_bytes()))
            .collect();
        assert_eq!(hashes, vector.hashes);
    }
}
