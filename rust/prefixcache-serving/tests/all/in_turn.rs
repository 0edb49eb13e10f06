//! Calls that use a value in turn, of which one panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::thread;

use prefixcache_serving::routing::in_turn::{InTurn, Panicked};

#[test]
fn nobody_uses_what_a_call_left_half_done() {
    let value = InTurn::new([0, 0]);
    let (began, has_begun) = channel();
    let (go_on, may_go_on) = channel::<()>();
    thread::scope(|scope| {
        let value = &value;
        let panics = scope.spawn(move || {
            let work = |pair: &mut [i32; 2]| {
                pair[0] = 1;
                began.send(()).unwrap();
                may_go_on.recv().unwrap();
                panic!("between two changes");
            };
            catch_unwind(AssertUnwindSafe(|| value.with(work))).is_err()
        });
        has_begun.recv().unwrap();
        let waits = scope.spawn(move || value.with(|pair| *pair));
        go_on.send(()).unwrap();
        assert!(panics.join().unwrap());
        assert_eq!(waits.join().unwrap(), Err(Panicked));
    });
    assert_eq!(value.with(|pair| *pair), Err(Panicked));
}
