//! What a trace file says, and what is said of a wrong one.

use std::fs;
use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use prefixcache_replay::trace::Trace;

const HEADER: &str = "#PTT1 name=small block=4 cols=..";

fn read(text: &str) -> Trace {
    Trace::read_lines("text", text.as_bytes()).unwrap()
}

fn error_of(text: &str) -> String {
    Trace::read_lines("text", text.as_bytes())
        .unwrap_err()
        .to_string()
}

fn prompts(trace: &Trace) -> Vec<Vec<usize>> {
    let path = |request| {
        trace
            .prompt(request)
            .iter()
            .map(|node| node.index())
            .collect()
    };
    trace.requests.iter().map(path).collect()
}

#[test]
fn a_prompt_is_the_path_to_its_fork_and_its_new_blocks() {
    let trace = read(&format!(
        "{HEADER}\n0,9,5,-1,0,-1,2,1,1\n7,16,0,3,1,2,1,3,0\n8,3,1,3,0,-1,0,-1,0"
    ));
    assert_eq!((trace.name.as_str(), trace.block_size), ("small", 4));
    assert_eq!(prompts(&trace), [vec![0, 1], vec![0, 1, 2, 3], vec![]]);
    assert_eq!(trace.tree.path(trace.requests[0].answer).len(), 3);
    assert_eq!(trace.requests[0].session, None);
    assert_eq!(trace.requests[1].session, Some(3));
    assert_eq!(trace.num_prompt_blocks(), 4);
}

#[test]
fn a_hash_id_is_a_block_after_those_before_it() {
    let line = |ids: &str, length| {
        format!(
            r#"{{"timestamp": 1, "input_length": {length}, "output_length": 2, "hash_ids": [{ids}]}}"#
        )
    };
    let lines = [
        line("5, 6", 1024),
        line("5, 7, 8", 1025),
        line("9, 6", 1024),
    ];
    let trace = read(&lines.join("\n"));
    // The last id of the second line is of a block with one token.
    assert_eq!(prompts(&trace), [[0, 1], [0, 2], [3, 4]]);
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
    assert_eq!(prompts(&Trace::read(&path).unwrap()), [[0, 1]]);
    fs::write(&path, &packed[..packed.len() - 9]).unwrap();
    let error = Trace::read(&path).unwrap_err().to_string();
    fs::remove_dir_all(&folder).unwrap();
    assert!(error.contains("small.gz"), "{error}");
    let missing = Trace::read(&path).unwrap_err().to_string();
    assert!(missing.contains("small.gz"), "{missing}");
}

#[test]
fn errors_name_the_line_and_the_field() {
    let first = "0,9,5,-1,0,-1,2,1,1";
    let cases = [
        ("", "line 1: header is missing"),
        ("time,tokens", "line 1: header must be"),
        ("#PTT1 name=x", "line 1: block must be"),
        ("#PTT1 block=0", "line 1: block must be"),
        ("{}", "line 1: object cannot be read"),
        (
            r#"{"timestamp": 0, "input_length": 513, "output_length": 0, "hash_ids": [1]}"#,
            "hash_ids must be 2",
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
        (
            "0,9000000000,5,-1,0,-1,2250000000,1,1",
            "in_tokens must be at most",
        ),
        ("0,9,5,-1,0,-1,3,1,1", "n_new must make a prompt of 2"),
        (
            "0,9,5,-1,0,3,0,1,1",
            "fork must be -1 or one of the 3 nodes",
        ),
        ("0,9,5,-1,0,-2,0,1,1", "fork must be -1"),
        ("0,9,5,-1,0,1,0,1,9", "gnew must be at most 2"),
        ("", "t_ms must be a number"),
    ];
    for (line, expected) in cases {
        let error = error_of(&format!("{HEADER}\n{first}\n{line}\n"));
        assert!(
            error.contains("text, line 3") && error.contains(expected),
            "{line:?}: {error}"
        );
    }
    let error = error_of(&format!(
        "{HEADER}\n5,3,0,-1,0,-1,0,-1,0\n4,3,0,-1,0,-1,0,-1,0"
    ));
    assert!(error.contains("line 3: time must not be before"), "{error}");
}
