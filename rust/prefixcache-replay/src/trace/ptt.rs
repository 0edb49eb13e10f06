//! Lines of a PTT file.

use super::{BlockKey, Fault, Form, Request, check_tokens};

const FIELDS: [&str; 9] =
    ["t_ms", "in_tokens", "out_tokens", "session", "class", "fork", "n_new", "gfork", "gnew"];

/// The parent of a node under the root.
const ROOT: u32 = u32::MAX;

/// The form after its first line, and all nodes so far by their parents.
pub(super) struct Ptt {
    block_size: usize,
    parents: Vec<u32>,
}

/// Reads the first line: the form, and the trace's name.
pub(super) fn begin(line: &str) -> Result<(Ptt, Option<String>), Fault> {
    let Some(header) = line.strip_prefix("#PTT1 ") else {
        let reason = match line.starts_with("#PTT") {
            true => "is of another version than #PTT1",
            false => "must be `#PTT1 name=.. block=..`, or an object of JSON",
        };
        return Err(Fault::new("header", reason));
    };
    let value = |name| header.split(' ').find_map(|field| field.strip_prefix(name));
    let block_size = value("block=")
        .and_then(|size| size.parse().ok())
        .filter(|&size| size > 0)
        .ok_or_else(|| Fault::new("block", "must be the tokens in a block, at least 1"))?;
    let parents = Vec::new();
    Ok((Ptt { block_size, parents }, value("name=").map(str::to_owned)))
}

fn numbers(line: &str) -> Result<[i64; 9], Fault> {
    let mut numbers = [0; FIELDS.len()];
    let mut found = line.split(',');
    for (number, field) in numbers.iter_mut().zip(FIELDS) {
        let text = found.next().ok_or_else(|| Fault::new(field, "is missing"))?;
        let parsed = text.parse();
        *number =
            parsed.map_err(|_| Fault::new(field, format!("must be a number, not {text:?}")))?;
    }
    match found.next() {
        None => Ok(numbers),
        Some(_) => Err(Fault::new("gnew", "must be the last field")),
    }
}

fn unsigned(field: &'static str, number: i64) -> Result<u64, Fault> {
    let reason = || format!("must not be negative: {number}");
    u64::try_from(number).map_err(|_| Fault::new(field, reason()))
}

impl Ptt {
    /// Tokens in a block.
    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// The node of a number, where -1 is the root.
    fn node(&self, field: &'static str, number: i64) -> Result<u32, Fault> {
        let known = self.parents.len();
        match usize::try_from(number) {
            Ok(index) if index < known => Ok(index as u32),
            _ if number == -1 => Ok(ROOT),
            _ => {
                let reason = format!("must be -1 or one of the {known} nodes before, not {number}");
                Err(Fault::new(field, reason))
            }
        }
    }

    /// `count` new nodes under `end`; the last of them.
    fn extend(&mut self, field: &'static str, mut end: u32, count: usize) -> Result<u32, Fault> {
        if count > ROOT as usize - self.parents.len() {
            let reason = "must not make more nodes than a trace can have";
            return Err(Fault::new(field, reason));
        }
        for _ in 0..count {
            let node = self.parents.len() as u32;
            self.parents.push(std::mem::replace(&mut end, node));
        }
        Ok(end)
    }

    /// Writes the path from the root to `end`.
    fn write_path(&self, mut end: u32, path: &mut Vec<BlockKey>) {
        path.clear();
        while end != ROOT {
            path.push(end.into());
            end = self.parents[end as usize];
        }
        path.reverse();
    }
}

impl Form for Ptt {
    fn read_line(&mut self, line: &str, request: &mut Request) -> Result<(), Fault> {
        let [time, input, output, session, _, fork, new, answer_fork, answer_new] = numbers(line)?;
        request.time_ms = unsigned("t_ms", time)?;
        request.input_tokens = check_tokens("in_tokens", unsigned("in_tokens", input)?)?;
        request.output_tokens = check_tokens("out_tokens", unsigned("out_tokens", output)?)?;
        request.session = u32::try_from(session).ok();
        let fork = self.node("fork", fork)?;
        let new = check_tokens("n_new", unsigned("n_new", new)?)?;
        let full = request.input_tokens / self.block_size;
        if new > full {
            let reason = format!("must be at most the {full} blocks that its tokens fill: {new}");
            return Err(Fault::new("n_new", reason));
        }
        let prompt = self.extend("n_new", fork, new)?;
        let answer_fork = self.node("gfork", answer_fork)?;
        let answer_new = check_tokens("gnew", unsigned("gnew", answer_new)?)?;
        let most = request.output_tokens / self.block_size + 1;
        if answer_new > most {
            let reason =
                format!("must be at most {most}, as the answer's tokens are few, not {answer_new}");
            return Err(Fault::new("gnew", reason));
        }
        let answer = self.extend("gnew", answer_fork, answer_new)?;
        self.write_path(answer, &mut request.blocks);
        let goes_on = match full {
            0 => prompt == ROOT,
            _ => request.blocks.get(full - 1) == Some(&prompt.into()),
        };
        if !goes_on {
            // The answer's blocks do not lie behind the prompt's: they are those of another text.
            self.write_path(prompt, &mut request.blocks);
            let length = request.blocks.len();
            if length != full {
                let reason = format!(
                    "must make a prompt of {full} blocks, which its tokens fill, not of {length}"
                );
                return Err(Fault::new("n_new", reason));
            }
        }
        request.num_prompt_blocks = full;
        Ok(())
    }
}
