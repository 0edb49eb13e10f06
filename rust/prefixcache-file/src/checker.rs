//! The thread that reads and waits for the disk, so that no step does. It computes the checksums of restored blocks
//! that a request waits for, of what is published, and else of restored blocks that nobody has hit yet. It runs at a
//! low priority where the system has one for threads.

use std::io;
use std::mem;
use std::process;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;
use std::thread::{self, JoinHandle};

use crate::space;
use crate::table::Table;

/// Runs until it is dropped, which waits for what was published until then.
#[derive(Debug)]
pub(crate) struct Checker {
    table: Arc<Table>,
    thread: Option<JoinHandle<()>>,
    /// The id of the process that has the thread: one that was forked off has none.
    process: u32,
}

impl Checker {
    pub(crate) fn start(table: Arc<Table>) -> io::Result<Self> {
        let shared = Arc::clone(&table);
        let thread =
            thread::Builder::new().name("kv-checksums".into()).spawn(move || work(&shared))?;
        let _ = table.thread.set(thread.thread().clone());
        Ok(Self { table, thread: Some(thread), process: process::id() })
    }
}

pub(crate) fn work(table: &Table) {
    space::yield_to_others();
    loop {
        table.sync();
        // At the end nobody waits for reads any more.
        let has_read = !table.stopped.load(SeqCst) && table.check_asked();
        if has_read || table.complete_next() {
            continue;
        }
        // Read before the queue is looked at for the last time.
        if table.stopped.load(SeqCst) && !table.has_pending() {
            return;
        }
        if table.check_next() {
            continue;
        }
        table.sleeps.store(true, Relaxed);
        // Of this thread and one that publishes at least one sees what the other stored before its fence.
        fence(SeqCst);
        if !table.has_work() && !table.stopped.load(SeqCst) {
            thread::park();
        }
        table.sleeps.store(false, Relaxed);
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        if process::id() != self.process {
            mem::forget(self.thread.take());
            return;
        }
        self.table.stopped.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
