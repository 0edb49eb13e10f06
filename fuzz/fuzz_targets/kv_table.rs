//! A file of any bytes is at most a cold start: nothing panics, and what is restored is a sound pool.

#![no_main]

use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use prefixcache_core::Writer;
use prefixcache_core::events::{BlockTokens, ShortHash};
use prefixcache_core::id::{BlockHash, BlockId, BlockKey, GroupId};
use prefixcache_core::store::{BlockStore, PoolConfig};
use prefixcache_file::{KvFile, Layout, describe};

const NUM_BLOCKS: usize = 8;
const NUM_GROUPS: u16 = 2;

/// Words that are written over header and table, at places; bytes of the header; how much is cut off.
type Input = (Vec<(u16, u64)>, Vec<u8>, u8);

/// A file of some blocks, as a process left it.
static LEFT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let file = file_in_memory();
    let kv = KvFile::open(file.try_clone().unwrap(), &layout()).unwrap();
    let store = kv.store();
    store.set_durable(true);
    for block in 1..NUM_BLOCKS as u32 {
        store.published(BlockId::new(block), &key(block));
        let parent = (block > 2).then(|| ShortHash(block.into()));
        let tokens = vec![block; 4].into();
        store.keep_tokens(BlockId::new(block), BlockTokens { parent, tokens });
    }
    drop(store);
    drop(kv); // Waits until the checksums are there.
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
});

fn key(block: u32) -> BlockKey {
    BlockKey::new(BlockHash::from_bytes([block as u8; 32]), GroupId::new((block % 2) as u16))
}

fn layout() -> Layout {
    Layout {
        digest: [1; 32],
        num_tensors: 1,
        block_bytes: 64,
        capacity: NUM_BLOCKS as u64,
        block_tokens: 4,
        about: String::new(),
    }
}

fn file_in_memory() -> File {
    // SAFETY: the name is a C string; the descriptor is new, and nobody else's.
    unsafe { File::from_raw_fd(libc::memfd_create(c"kv".as_ptr(), libc::MFD_CLOEXEC)) }
}

fuzz_target!(|input: Input| {
    let (words, header, cut) = input;
    let file = file_in_memory();
    // Behind the table all is zero.
    file.write_all_at(&LEFT[..8192], 0).unwrap();
    file.set_len(LEFT.len() as u64 - u64::from(cut)).unwrap();
    for (place, word) in &words {
        let at = 8 * (u64::from(*place) % 1024);
        file.write_all_at(&word.to_le_bytes(), at).unwrap();
    }
    file.write_all_at(&header[..header.len().min(4096)], 0).unwrap();
    let Ok(layout) = describe(&file).map(|found| Layout { capacity: NUM_BLOCKS as u64, ..found })
    else {
        return;
    };
    let Ok(kv) = KvFile::open(file.try_clone().unwrap(), &layout) else {
        return;
    };
    assert!(
        file.metadata().unwrap().len() >= kv.tensor_at(layout.num_tensors),
        "tensors behind the end"
    );
    let _ = kv.survey(true);
    let kept = kv.take_kept(NUM_BLOCKS, NUM_GROUPS);
    let mut pool = Writer::new(PoolConfig::new(NUM_BLOCKS)).unwrap();
    let restored = pool.keep_in(kv.store(), &kept.blocks).unwrap();
    assert_eq!(restored, kept.blocks.len());
    let _ = pool.keep_events(4).unwrap().take(usize::MAX);
    for one in &kept.blocks {
        let state = 512 + 8 * one.block.index();
        let is_forged = words.iter().any(|(place, _)| usize::from(*place) % 1024 == state);
        assert!(is_forged || one.key == key(one.block.get()), "a torn record counts");
        let mut blocks = Vec::new();
        if pool.commit([one.key].into_iter(), 0, &mut blocks) == Ok(1) {
            pool.release(&blocks).unwrap();
        }
    }
    pool.validate().unwrap();
    pool.clear_index();
});
