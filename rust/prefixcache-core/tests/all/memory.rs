//! What a pool takes of the machine's memory.

use std::env;
use std::process::Command;

use prefixcache_core::pool::Writer;
use prefixcache_core::store::{BlockStore, Lookup, PoolConfig};
use prefixcache_oracle::pools::Tested;
use prefixcache_oracle::random::key;

const BLOCKS: &str = "PREFIXCACHE_TEST_BLOCKS";

/// Memory of this process that is not in files, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Fills a pool with content and prints how many bytes it took, in a process of its own.
#[test]
#[ignore = "`a_block_takes_at_most_96_bytes` runs it"]
fn fill_a_pool() {
    let num_blocks: usize = env::var(BLOCKS).unwrap().parse().unwrap();
    let before = resident();
    let mut pool = Writer::build(PoolConfig::new(num_blocks));
    let mut block = Vec::with_capacity(1);
    for number in 1..num_blocks as u64 {
        pool.allocate(1, &mut block).unwrap();
        let _ = pool.register(block[0], key(number), pool.epoch()).unwrap();
        pool.release(&block).unwrap();
        block.clear();
    }
    assert_eq!(pool.stats().cached, num_blocks - 1);
    println!("took {}", resident() - before);
}

fn bytes_of_a_pool(num_blocks: usize) -> usize {
    let arguments = ["memory::fill_a_pool", "--exact", "--ignored", "--nocapture"];
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(arguments).env(BLOCKS, num_blocks.to_string()).output().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let (_, bytes) = output.split_once("took ").expect("the child printed");
    bytes.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_block_takes_at_most_96_bytes() {
    assert!(bytes_of_a_pool(64) < 300_000);
    // Of each of the two tables a huge page may be in use in part.
    let partly_used = 2 * (2 << 20);
    for num_blocks in [1 << 17, (1 << 17) + 1, 3 << 16, (1 << 18) + 1] {
        let bytes = bytes_of_a_pool(num_blocks);
        assert!(bytes <= 96 * num_blocks + partly_used, "{bytes} bytes for {num_blocks} blocks");
    }
}
