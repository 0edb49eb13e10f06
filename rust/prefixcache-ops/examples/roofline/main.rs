//! What one thread's instructions and memory give, and next to it what the linears take of that.
//!
//! `benches/kernels/roofline.py` runs it, counts the kernels' instructions and makes tables. Here each
//! line is a kind, names and a number, by the thread's own time, the best of several turns:
//!
//! - `clock GHz`: of a chain of additions; `chain NAME cycles`: what one of a chain takes;
//! - `peak NAME per-cycle`: independent instructions; `read WHERE GB/s`;
//! - `kernel WAY FORMAT ROWS WHERE G/s`: products of a weight and a number, in thousand millions;
//! - `steps WAY FORMAT ROWS ADDRESS:COUNT,...`: what a product with 64 outputs executes;
//! - `part NAME FORMAT ROWS G/s`: the same for what a product begins with.

mod kernels;
#[cfg(target_arch = "x86_64")]
mod peaks;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod steps;

/// Processor time of the calling thread, in seconds.
fn thread_seconds() -> f64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a timespec.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    assert_eq!(failed, 0, "the thread's clock");
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// The shortest time of each way, in seconds of the thread; they take turns.
fn best(turns: usize, ways: &mut [Box<dyn FnMut() + '_>]) -> Vec<f64> {
    let mut best = vec![f64::MAX; ways.len()];
    for _ in 0..turns {
        for (best, run) in best.iter_mut().zip(&mut *ways) {
            let begun = thread_seconds();
            run();
            *best = best.min(thread_seconds() - begun);
        }
    }
    best
}

fn main() {
    #[cfg(target_arch = "x86_64")]
    peaks::measure();
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    steps::measure();
    kernels::measure();
}
