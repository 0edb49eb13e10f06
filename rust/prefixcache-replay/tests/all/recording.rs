//! A recording's calls made again, where one can see what comes of them.

use std::fs;

use prefixcache_replay::recording::{Agreement, replay};

use crate::common::RECORDING;

fn replayed(name: &str, lines: &[String]) -> Agreement {
    let file = format!("prefixcache-{name}-{}.jsonl", std::process::id());
    let path = std::env::temp_dir().join(file);
    fs::write(&path, format!("{RECORDING}\n{}\n", lines.join("\n"))).unwrap();
    let found = replay(&path);
    fs::remove_file(&path).unwrap();
    found.unwrap()
}

/// A request of three blocks that computes `new` of its twelve tokens.
fn request(id: u64, first_name: u64, hit: usize, is_published: bool) -> Vec<String> {
    let names: String = (first_name..first_name + 3).map(|name| format!("{name:016x}")).collect();
    let new = 12 - hit;
    let mut lines = vec![
        // Who wrote a prompt, and what only the scheduler reads, changes nothing.
        format!(
            r#"{{"e": "add", "t": 0, "id": {id}, "tokens": 12, "names": "{names}", "max_tokens": 1, "priority": 2, "roles": [["system", 0, 4], ["user", 4, 12]]}}"#
        ),
        format!(
            r#"{{"e": "start", "t": 0, "id": {id}, "tokens": 12, "hit": {hit}, "new": {new}}}"#
        ),
    ];
    if is_published {
        lines.push(format!(
            r#"{{"e": "publish", "t": 0, "ids": [{id}], "upto": [12], "names": [""]}}"#
        ));
    }
    lines
}

fn end(id: u64) -> String {
    format!(r#"{{"e": "end", "t": 0, "ids": [{id}], "tokens": [12], "well": [true]}}"#)
}

/// The first of two requests leaves the lower half of the pool empty, then it shrinks to that half, and the second
/// one's blocks are asked for again, of which `hit` tokens are there.
fn shrunk(moved: bool, hit: usize, counters: &str) -> Vec<String> {
    let mut lines = request(0, 10, 0, false);
    lines.extend(request(1, 20, 0, true));
    lines.extend([end(0), end(1)]);
    lines.push(format!(r#"{{"e": "move", "t": 0, "blocks": 4, "most": 8, "moved": {moved}}}"#));
    lines.push(r#"{"e": "resize", "t": 0, "blocks": 4}"#.to_owned());
    lines.extend(request(2, 20, hit, true));
    lines.push(end(2));
    lines.push(format!(r#"{{"e": "counters", "t": 0, {counters}}}"#));
    lines
}

#[test]
fn a_shrink_keeps_what_was_moved_and_costs_the_rest() {
    let kept = r#""queries": 36, "hits": 8, "evictions": 1, "allocations": 7, "touches": 2, "pins": 0, "demotions": 0, "moved": 3, "lost_to_resize": 0, "cached": 3, "in_use": 0"#;
    let lost = r#""queries": 36, "hits": 0, "evictions": 3, "allocations": 9, "touches": 0, "pins": 0, "demotions": 0, "moved": 0, "lost_to_resize": 3, "cached": 3, "in_use": 0"#;
    for (name, moved, hit, counters) in [("kept", true, 8, kept), ("lost", false, 0, lost)] {
        let found = replayed(name, &shrunk(moved, hit, counters));
        assert_eq!(found.difference, None, "{name}: {:?}", found.replayed);
        assert!(found.agrees());
    }
}
