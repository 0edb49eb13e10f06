//! What a trace file says, and what is said of a wrong one.

use std::fs;
use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use prefixcache_replay::trace::{Reader, Request, TraceError};

use crate::common::{RECORDING, reader};

const HEADER: &str = "#PTT1 name=small block=4 cols=..";

fn try_read(text: &str) -> Result<Vec<Request>, TraceError> {
    reader(text)?.collect()
}

fn read(text: &str) -> Vec<Request> {
    try_read(text).unwrap()
}

fn error_of(text: &str) -> String {
    try_read(text).unwrap_err().to_string()
}

fn prompts(requests: &[Request]) -> Vec<&[u64]> {
    requests.iter().map(Request::prompt).collect()
}

#[test]
fn a_prompt_is_the_path_to_its_fork_and_its_new_blocks() {
    let text = format!("{HEADER}\n0,9,5,-1,0,-1,2,1,1\n7,16,0,3,1,2,1,3,0\n8,3,1,3,0,-1,0,-1,0");
    let reader = reader(&text).unwrap();
    assert_eq!((reader.name(), reader.block_size()), ("small", 4));
    let requests = read(&text);
    assert_eq!(prompts(&requests), [&[0_u64, 1] as &[u64], &[0, 1, 2, 3], &[]]);
    assert_eq!(requests[0].blocks, [0, 1, 2]);
    assert_eq!(requests[0].session, None);
    assert_eq!(requests[1].session, Some(3));
}

#[test]
fn a_hash_id_is_a_block_after_those_before_it() {
    let line = |ids: &str, length| {
        format!(
            r#"{{"timestamp": 1, "input_length": {length}, "output_length": 2, "hash_ids": [{ids}]}}"#
        )
    };
    let lines = [line("5, 6", 1024), line("5, 7, 8", 1025), line("9, 6", 1024)];
    let requests = read(&lines.join("\n"));
    let [one, two, three] = [0, 1, 2].map(|index| requests[index].prompt());
    // The last id of the second line is of a block with one token.
    assert_eq!([one.len(), two.len(), three.len()], [2; 3]);
    assert!(one[0] == two[0] && one[1] != two[1]);
    assert!(three.iter().all(|key| !one.contains(key)), "6 stands behind another block");
}

#[test]
fn a_packed_file_reads_as_a_plain_one_and_a_cut_one_is_refused() {
    let text = format!("{HEADER}\n0,9,5,-1,0,-1,2,1,1\n");
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();
    let folder = std::env::temp_dir().join(format!("prefixcache-trace-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("small.gz");
    fs::write(&path, &packed).unwrap();
    let open = || Reader::open(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    assert_eq!(prompts(&open().unwrap()), [[0, 1]]);
    fs::write(&path, &packed[..packed.len() - 9]).unwrap();
    let error = open().unwrap_err().to_string();
    fs::remove_dir_all(&folder).unwrap();
    assert!(error.contains("small.gz, line"), "{error}");
    let missing = open().unwrap_err().to_string();
    assert!(missing.contains("small.gz"), "{missing}");
}

#[test]
fn errors_name_the_line_and_the_field() {
    let first = "0,9,5,-1,0,-1,2,1,1";
    let cases = [
        ("", "line 1: header is missing"),
        ("time,tokens", "line 1: header must be"),
        ("#PTT2 name=x block=4", "line 1: header is of another version"),
        ("#PTT1 name=x", "line 1: block must be"),
        ("#PTT1 block=0", "line 1: block must be"),
        ("{}", "line 1: object cannot be read"),
        (
            r#"{"timestamp": 0, "input_length": 513, "output_length": 0, "hash_ids": [1]}"#,
            "hash_ids must be 2 ids, of blocks of 512",
        ),
        (
            r#"{"timestamp": 0, "input_length": 1e18, "output_length": 0, "hash_ids": []}"#,
            "object cannot be read",
        ),
        (
            r#"{"timestamp": 0, "input_length": 999999999, "output_length": 0, "hash_ids": []}"#,
            "input_length must be at most",
        ),
    ];
    for (text, expected) in cases {
        let error = error_of(text);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
    let cases = [
        ("0,9,5,-1,0,-1,2,1", "gnew is missing"),
        ("0,9,5,-1,0,-1,2,1,1,1", "gnew must be the last"),
        ("0,x,5,-1,0,-1,2,1,1", "in_tokens must be a number"),
        ("0,-9,5,-1,0,-1,2,1,1", "in_tokens must not be negative"),
        ("0,9000000000,5,-1,0,-1,2250000000,1,1", "in_tokens must be at most"),
        ("0,9,5,-1,0,-1,3,1,1", "n_new must be at most the 2"),
        ("0,9,5,-1,0,0,2,1,1", "n_new must make a prompt of 2"),
        ("0,9,5,-1,0,3,0,1,1", "fork must be -1 or one of the 3 nodes"),
        ("0,9,5,-1,0,-2,0,1,1", "fork must be -1"),
        ("0,9,5,-1,0,1,0,1,9", "gnew must be at most 2"),
        ("", "t_ms must be a number"),
    ];
    for (line, expected) in cases {
        let error = error_of(&format!("{HEADER}\n{first}\n{line}\n"));
        assert!(error.contains("text, line 3") && error.contains(expected), "{line:?}: {error}");
    }
    let error = error_of(&format!("{HEADER}\n5,3,0,-1,0,-1,0,-1,0\n4,3,0,-1,0,-1,0,-1,0"));
    assert!(error.contains("line 3: time must not be before"), "{error}");
}

fn names(blocks: &[u64]) -> String {
    blocks.iter().map(|block| format!("{block:016x}")).collect()
}

#[test]
fn a_recordings_requests_come_in_the_order_of_arrival_once_they_have_ended() {
    let lines = [
        RECORDING.to_owned(),
        format!(
            r#"{{"e": "add", "t": 3, "id": 0, "tokens": 9, "names": "{}", "hints": [[0, 4, 80, null]], "max_tokens": 4, "priority": 1, "roles": [["user", 0, 9]]}}"#,
            names(&[1, 2])
        ),
        format!(r#"{{"e": "add", "t": 4, "id": 1, "tokens": 4, "names": "{}"}}"#, names(&[1])),
        r#"{"e": "start", "t": 4, "id": 0, "tokens": 9, "names": "", "hit": 0, "new": 9}"#
            .to_owned(),
        r#"{"e": "end", "t": 5, "ids": [1], "tokens": [6], "well": [true]}"#.to_owned(),
        format!(
            r#"{{"e": "publish", "t": 6, "ids": [0], "upto": [12], "names": ["{}"]}}"#,
            names(&[3])
        ),
        r#"{"e": "expire", "t": 6}"#.to_owned(),
        r#"{"e": "end", "t": 7, "ids": [0], "tokens": [13], "well": [true]}"#.to_owned(),
        r#"{"e": "reset", "t": 8}"#.to_owned(),
        format!(r#"{{"e": "add", "t": 9, "id": 2, "tokens": 4, "names": "{}"}}"#, names(&[1])),
        // The line that the server was writing when it was killed.
        r#"{"e": "add", "t": 9, "id"#.to_owned(),
    ];
    let requests = read(&lines.join("\n"));
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[0].blocks, [1, 2, 3]);
    assert_eq!(requests[0].prompt(), [1, 2]);
    assert_eq!(requests[0].hints.len(), 1);
    assert_eq!([0, 1, 2].map(|at| requests[at].time_ms), [3, 4, 9]);
    assert_eq!([0, 1, 2].map(|at| requests[at].output_tokens), [4, 2, 0]);
    assert_ne!(requests[2].prompt(), [1], "what was cached before a reset hits no more");
}

#[test]
fn an_answer_that_starts_again_leaves_nothing_of_the_first_one() {
    let add =
        format!(r#"{{"e": "add", "t": 0, "id": 0, "tokens": 4, "names": "{}"}}"#, names(&[1]));
    let publish = |name| {
        let names = names(&[name]);
        format!(r#"{{"e": "publish", "t": 0, "ids": [0], "upto": [8], "names": ["{names}"]}}"#)
    };
    let restart = r#"{"e": "restart", "t": 0, "id": 0}"#.to_owned();
    let end = r#"{"e": "end", "t": 0, "ids": [0], "tokens": [9], "well": [true]}"#.to_owned();
    let lines = [RECORDING.to_owned(), add, publish(2), restart, publish(3), end];
    assert_eq!(read(&lines.join("\n"))[0].blocks, [1, 3]);
}

#[test]
fn a_wrong_recording_is_reported_with_line_and_field() {
    let cases = [
        (r#"{"prefixcache_trace": 2}"#, "line 1: prefixcache_trace must be 1, not 2"),
        (
            &RECORDING.replace("\"block_size\": 4", "\"block_size\": 0"),
            "line 1: block_size must be",
        ),
    ];
    for (text, expected) in cases {
        let error = error_of(text);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
    let cases = [
        (r#"{"e": "unheard", "t": 0}"#, "event cannot be read: unknown variant `unheard`"),
        (r#"{"e": "add", "t": 1, "id": 1, "tokens": 4, "names": ""}"#, "id must be 0"),
        (r#"{"e": "add", "t": 1, "id": 0, "tokens": 4, "names": "0g"}"#, "names must be 16"),
        (
            r#"{"e": "add", "t": 1, "id": 0, "tokens": 3, "names": "0000000000000001"}"#,
            "names must be of at most 0",
        ),
        (
            r#"{"e": "add", "t": -1, "id": 0, "tokens": 3, "names": ""}"#,
            "event cannot be read: invalid value: integer `-1`",
        ),
        (r#"{"e": "add", "t": 1, "id": 0}"#, "event cannot be read: missing field `tokens`"),
    ];
    for (line, expected) in cases {
        let error = error_of(&format!("{RECORDING}\n{line}\n"));
        assert!(error.contains("text, line 2") && error.contains(expected), "{line:?}: {error}");
    }
}
