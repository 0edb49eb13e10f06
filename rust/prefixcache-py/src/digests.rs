//! The functions `hash_file_ranges` and `derive_digest`: digests of what a cache's root stands for, such as the
//! tensors of a checkpoint.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};

use prefixcache_core::error::Argument;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{List, Number, Value, whole_numbers};
use crate::errors::{Result, ensure, out_of_range};
use crate::names;

/// (start, end) in bytes.
impl Value for Range<u64> {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let [start, end] = whole_numbers(argument, "(start, end) in bytes", value)?;
        ensure!(start <= end, argument, "must not end before its start");
        Ok(start..end)
    }
}

/// BLAKE3 of each range of bytes of a file, which `threads` threads read.
///
/// Raises OSError when the file cannot be read or ends within a range. Lets other threads run meanwhile.
#[pyfunction]
pub fn hash_file_ranges<'py>(
    py: Python<'py>,
    path: PathBuf,
    ranges: List<names::Ranges, Range<u64>>,
    threads: Number<names::ThreadCount>,
) -> Result<Vec<Bound<'py, PyBytes>>> {
    let threads = NonZeroUsize::new(threads.0)
        .ok_or_else(|| out_of_range("threads", "must be at least 1, not 0"))?;
    let digests = py.detach(|| hash_ranges(&File::open(path)?, &ranges.0, threads))?;
    Ok(digests.iter().map(|one| PyBytes::new(py, one)).collect())
}

/// BLAKE3 of `data` in key derivation mode, whose `context` says what it is of: 32 bytes.
#[pyfunction]
pub fn derive_digest<'py>(py: Python<'py>, context: &str, data: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &blake3::derive_key(context, data))
}

/// Bytes read at once: enough for the widest vectors, and they stay in a core's cache.
const CHUNK: usize = 256 << 10;

/// BLAKE3 of each range of bytes of the file, 32 bytes each, by up to `threads` threads.
///
/// The file is read and not mapped, since a mapped file that somebody cuts short ends the process. Fails as
/// reading does, and with `UnexpectedEof` where the file ends within a range.
fn hash_ranges(
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
