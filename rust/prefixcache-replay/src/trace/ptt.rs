//! Lines of a PTT file.

use super::{Fault, Form, Node, Request, Trace, check_tokens};

const FIELDS: [&str; 9] = [
    "t_ms",
    "in_tokens",
    "out_tokens",
    "session",
    "class",
    "fork",
    "n_new",
    "gfork",
    "gnew",
];

/// The form after its first line.
pub(super) struct Ptt;

impl Ptt {
    /// Reads the first line: name and block size.
    pub(super) fn begin(line: &str, trace: &mut Trace) -> Result<Self, Fault> {
        let Some(header) = line.strip_prefix("#PTT1 ") else {
            let reason = "must be `#PTT1 name=.. block=..`, or an object of JSON";
            return Err(Fault::new("header", reason));
        };
        let value = |name| header.split(' ').find_map(|field| field.strip_prefix(name));
        if let Some(name) = value("name=") {
            trace.name = name.into();
        }
        trace.block_size = value("block=")
            .and_then(|size| size.parse().ok())
            .filter(|&size| size > 0)
            .ok_or_else(|| Fault::new("block", "must be the tokens in a block, at least 1"))?;
        Ok(Self)
    }

    fn numbers(line: &str) -> Result<[i64; 9], Fault> {
        let mut numbers = [0; FIELDS.len()];
        let mut found = line.split(',');
        for (number, field) in numbers.iter_mut().zip(FIELDS) {
            let text = found
                .next()
                .ok_or_else(|| Fault::new(field, "is missing"))?;
            let parsed = text.parse();
            *number =
                parsed.map_err(|_| Fault::new(field, format!("must be a number, not {text:?}")))?;
        }
        match found.next() {
            None => Ok(numbers),
            Some(_) => Err(Fault::new("gnew", "must be the last field")),
        }
    }
}

/// The node of a number, where -1 is the root.
fn parent(trace: &Trace, field: &'static str, number: i64) -> Result<Option<Node>, Fault> {
    if number == -1 {
        return Ok(None);
    }
    let node = usize::try_from(number)
        .ok()
        .and_then(|index| trace.tree.node(index));
    let reason = || {
        format!(
            "must be -1 or one of the {} nodes before, not {number}",
            trace.tree.len()
        )
    };
    node.map(Some).ok_or_else(|| Fault::new(field, reason()))
}

/// `count` new nodes under `end`, at most `most`; the last of them.
fn extend(
    trace: &mut Trace,
    field: &'static str,
    mut end: Option<Node>,
    count: usize,
) -> Result<Option<Node>, Fault> {
    for _ in 0..count {
        end = trace.tree.add(end);
        if end.is_none() {
            return Err(Fault::new(
                field,
                "must not make more nodes than a trace can have",
            ));
        }
    }
    Ok(end)
}

fn unsigned(field: &'static str, number: i64) -> Result<u64, Fault> {
    let reason = || format!("must not be negative: {number}");
    u64::try_from(number).map_err(|_| Fault::new(field, reason()))
}

impl Form for Ptt {
    fn read_line(&mut self, line: &str, trace: &mut Trace) -> Result<(), Fault> {
        let [
            time,
            input,
            output,
            session,
            _,
            fork,
            new,
            answer_fork,
            answer_new,
        ] = Self::numbers(line)?;
        let input_tokens = check_tokens("in_tokens", unsigned("in_tokens", input)?)?;
        let output_tokens = check_tokens("out_tokens", unsigned("out_tokens", output)?)?;
        let fork = parent(trace, "fork", fork)?;
        let new = check_tokens("n_new", unsigned("n_new", new)?)?;
        let (length, full) = (
            trace.tree.depth(fork) + new,
            input_tokens / trace.block_size,
        );
        if length != full {
            let reason = format!(
                "must make a prompt of {full} blocks, which its tokens fill, not of {length}"
            );
            return Err(Fault::new("n_new", reason));
        }
        let prompt = extend(trace, "n_new", fork, new)?;
        let answer_fork = parent(trace, "gfork", answer_fork)?;
        let answer_new = check_tokens("gnew", unsigned("gnew", answer_new)?)?;
        let most = output_tokens / trace.block_size + 1;
        if answer_new > most {
            let reason =
                format!("must be at most {most}, as the answer's tokens are few, not {answer_new}");
            return Err(Fault::new("gnew", reason));
        }
        let answer = extend(trace, "gnew", answer_fork, answer_new)?;
        trace.push(Request {
            time_ms: unsigned("t_ms", time)?,
            input_tokens,
            output_tokens,
            session: u32::try_from(session).ok(),
            prompt,
            answer,
        })
    }
}
