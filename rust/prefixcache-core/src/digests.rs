//! Digests of what a cache's root stands for: parts of a file, such as the tensors of a checkpoint, and lists.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::thread::{self, Builder};

use crate::sync::{AtomicUsize, Ordering};

/// Bytes read at once: enough for the widest vectors, and they stay in a core's cache.
const CHUNK: usize = 256 << 10;

/// BLAKE3 of each range of bytes of the file, 32 bytes each, by up to so many threads.
///
/// The file is read and not mapped, since a mapped file that somebody cuts short ends the process. Fails as
/// reading does, and with `UnexpectedEof` where the file ends within a range.
pub fn hash_ranges(
    file: &File,
    ranges: &[Range<u64>],
    threads: NonZeroUsize,
) -> io::Result<Vec<[u8; 32]>> {
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<Vec<(usize, [u8; 32])>> {
        let mut buffer = vec![0; CHUNK];
        let mut found = Vec::new();
        loop {
            // Relaxed: it deals out numbers and orders nothing.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = ranges.get(index) else {
                return Ok(found);
            };
            let digest = hash_range(file, range.clone(), &mut buffer);
            // After a failure nobody begins another.
            let digest = digest.inspect_err(|_| next.store(ranges.len(), Ordering::Relaxed))?;
            found.push((index, digest));
        }
    };
    let mut digests = vec![[0; 32]; ranges.len()];
    thread::scope(|scope| {
        let helpers = threads.get().min(ranges.len()).saturating_sub(1);
        // Where the system gives no more threads, those that there are do it all.
        let spawn = |_| Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (0..helpers).map_while(spawn).collect();
        let own = work();
        let theirs = helpers.into_iter().map(|one| match one.join() {
            Ok(found) => found,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        for found in std::iter::once(own).chain(theirs) {
            for (index, digest) in found? {
                digests[index] = digest;
            }
        }
        Ok(digests)
    })
}

/// BLAKE3 of the bytes in key derivation mode, whose `context` says what they are: 32 bytes.
#[must_use]
pub fn derive(context: &str, bytes: &[u8]) -> [u8; 32] {
    blake3::derive_key(context, bytes)
}

fn hash_range(file: &File, range: Range<u64>, buffer: &mut [u8]) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut at = range.start;
    while at < range.end {
        let count = (range.end - at).min(buffer.len() as u64) as usize;
        file.read_exact_at(&mut buffer[..count], at)?;
        hasher.update(&buffer[..count]);
        at += count as u64;
    }
    Ok(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn ranges_are_hashed_as_if_alone_by_any_number_of_threads() {
        let bytes: Vec<u8> = (0..3 * CHUNK + 17)
            .map(|at| ((at * at) >> 7) as u8)
            .collect();
        let path = std::env::temp_dir().join(format!("prefixcache-digests-{}", std::process::id()));
        File::create(&path).unwrap().write_all(&bytes).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let end = bytes.len() as u64;
        let ranges = [
            0..end,
            5..5,
            1..2,
            7..CHUNK as u64 + 7,
            end - 1..end,
            end..end,
        ];
        for threads in [1, 2, 9] {
            let found = hash_ranges(&file, &ranges, NonZeroUsize::new(threads).unwrap()).unwrap();
            for (range, digest) in ranges.iter().zip(&found) {
                let alone = &bytes[range.start as usize..range.end as usize];
                assert_eq!(digest, blake3::hash(alone).as_bytes());
            }
            let beyond = [0..1, end - 1..end + 1];
            let error = hash_ranges(&file, &beyond, NonZeroUsize::new(threads).unwrap());
            assert_eq!(error.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
