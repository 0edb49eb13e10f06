//! Space on the disk: a mapped file must have it before it is written to, or a full disk kills the process.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, RawFd};

/// The open file of a descriptor, by a descriptor of our own.
pub fn duplicate(descriptor: RawFd) -> io::Result<File> {
    // SAFETY: the call touches no memory of ours, and fails for what is no descriptor.
    let own = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is new, and nobody else's.
    Ok(unsafe { File::from_raw_fd(own) })
}

/// Gives the bytes from `at` on space. They keep their content, zero where there was none.
pub(crate) fn allocate(file: &File, at: u64, len: u64) -> io::Result<()> {
    system::fallocate(file, false, at, len)
}

/// Gives whole pages back; they read as zero.
pub(crate) fn punch(file: &File, at: u64, len: u64) -> io::Result<()> {
    system::fallocate(file, true, at, len)
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;

    pub(super) fn fallocate(file: &File, punches: bool, at: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let mode = match punches {
            true => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            false => 0,
        };
        let too_far = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let at = libc::off_t::try_from(at).map_err(too_far)?;
        let len = libc::off_t::try_from(len).map_err(too_far)?;
        loop {
            // SAFETY: the descriptor is open as long as `file` is borrowed; the call touches no memory of ours.
            if unsafe { libc::fallocate(file.as_raw_fd(), mode, at, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Lets other threads run first; on Linux, where threads have priorities of their own.
pub(crate) fn yield_to_others() {
    #[cfg(target_os = "linux")]
    // SAFETY: the call touches no memory. Where it is refused the thread runs as before.
    let _ = unsafe { libc::nice(10) };
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::File;
    use std::io;

    pub(super) fn fallocate(_: &File, _: bool, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
