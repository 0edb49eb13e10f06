//! JSON read into a tree, within limits on how much the text may hold.
//!
//! The limits hold while the text is read, so what is refused never takes memory. Stricter than
//! RFC 8259 where that leaves things open: no key twice, no lone surrogate, no infinite number.

use std::borrow::Cow;
use std::collections::HashSet;

use jiter::{Jiter, JiterError, JsonValue, Peek};

/// The most arrays and objects inside each other.
pub const MAX_DEPTH: usize = 128;

/// The most that a text may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Numbers.
    pub numbers: usize,
    /// Whatever is no number: strings, arrays, objects, constants, and the keys of objects.
    pub others: usize,
}

/// A JSON value. Text without escapes is borrowed.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer that no `i64` holds, in its digits.
    BigInt(&'a str),
    /// A number with a fraction or an exponent; finite.
    Float(f64),
    /// A string.
    Str(Cow<'a, str>),
    /// An array.
    Array(Vec<Value<'a>>),
    /// An object in the order of the text; no key is there twice.
    Object(Vec<(Box<str>, Value<'a>)>),
}

/// Why a text was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is not JSON, or not as strict as is asked here.
    Invalid(String),
    /// A number is too large for a float.
    OutOfRange {
        /// The number, shortened.
        number: String,
        /// As for `TooManyNumbers`.
        field: Option<String>,
    },
    /// An object has this key twice.
    Twice(String),
    /// There are more numbers than the limit. `field` is the key of the outermost object under
    /// which the limit was passed.
    TooManyNumbers {
        /// The key, if the text is an object.
        field: Option<String>,
    },
    /// There are more other values than the limit.
    TooManyOthers {
        /// As for numbers.
        field: Option<String>,
    },
}

/// Reads `text`, which must be UTF-8.
///
/// # Errors
/// What `Refusal` lists; the first one found.
pub fn parse(text: &[u8], limits: Limits) -> Result<Value<'_>, Refusal> {
    let mut reader = Reader { json: Jiter::new(text), text, left: limits, field: None };
    let value = reader.next(0);
    let value = value.and_then(|value| reader.json.finish().map(|()| value).map_err(Stop::from));
    value.map_err(|stop| reader.refusal(stop))
}

struct Reader<'a> {
    json: Jiter<'a>,
    text: &'a [u8],
    left: Limits,
    field: Option<String>,
}

/// Why the reader stopped, before the place is known.
enum Stop {
    Jiter(JiterError),
    Refused(Refusal),
}

impl From<JiterError> for Stop {
    fn from(error: JiterError) -> Self {
        Self::Jiter(error)
    }
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl<'a> Reader<'a> {
    fn next(&mut self, depth: usize) -> Result<Value<'a>, Stop> {
        let peek = self.json.peek()?;
        self.value(peek, depth)
    }

    fn value(&mut self, peek: Peek, depth: usize) -> Result<Value<'a>, Stop> {
        match peek {
            Peek::Array => self.array(depth),
            Peek::Object => self.object(depth),
            Peek::Null | Peek::True | Peek::False | Peek::String => self.scalar(peek),
            _ => self.number(peek),
        }
    }

    fn scalar(&mut self, peek: Peek) -> Result<Value<'a>, Stop> {
        self.count_other()?;
        Ok(match self.json.known_value(peek)? {
            JsonValue::Str(text) => Value::Str(text),
            JsonValue::Bool(value) => Value::Bool(value),
            _ => Value::Null,
        })
    }

    fn number(&mut self, peek: Peek) -> Result<Value<'a>, Stop> {
        self.count_number()?;
        let start = self.json.current_index();
        let length = self.json.known_number_bytes(peek)?.len();
        let all: &'a [u8] = self.text;
        // Digits are ASCII, so this cannot fail.
        let digits = std::str::from_utf8(&all[start..start + length]).unwrap_or_default();
        if digits.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
            return self.finite(digits).map(Value::Float);
        }
        Ok(digits.parse().map_or(Value::BigInt(digits), Value::Int))
    }

    fn array(&mut self, depth: usize) -> Result<Value<'a>, Stop> {
        self.enter(depth)?;
        let mut items = Vec::new();
        let mut next = self.json.known_array()?;
        while let Some(peek) = next {
            items.push(self.value(peek, depth + 1)?);
            next = self.json.array_step()?;
        }
        Ok(Value::Array(items))
    }

    fn object(&mut self, depth: usize) -> Result<Value<'a>, Stop> {
        self.enter(depth)?;
        let mut entries = Vec::new();
        let mut next = self.json.known_object()?.map(Box::<str>::from);
        while let Some(key) = next {
            if depth == 0 {
                self.field = Some(key.to_string());
            }
            self.count_other()?;
            entries.push((key, self.next(depth + 1)?));
            next = self.json.next_key()?.map(Box::<str>::from);
        }
        refuse_twice(&entries)?;
        Ok(Value::Object(entries))
    }

    fn enter(&mut self, depth: usize) -> Result<(), Stop> {
        if depth == MAX_DEPTH {
            let message = format!("it is nested more than {MAX_DEPTH} levels deep");
            return Err(Refusal::Invalid(message).into());
        }
        self.count_other()
    }

    fn count_number(&mut self) -> Result<(), Stop> {
        let left = self.left.numbers.checked_sub(1);
        let field = || self.field.clone();
        self.left.numbers = left.ok_or_else(|| Refusal::TooManyNumbers { field: field() })?;
        Ok(())
    }

    fn count_other(&mut self) -> Result<(), Stop> {
        let left = self.left.others.checked_sub(1);
        let field = || self.field.clone();
        self.left.others = left.ok_or_else(|| Refusal::TooManyOthers { field: field() })?;
        Ok(())
    }

    fn finite(&self, digits: &str) -> Result<f64, Stop> {
        match digits.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(value),
            _ => {
                let number = digits.get(..40).unwrap_or(digits).to_string();
                Err(Refusal::OutOfRange { number, field: self.field.clone() }.into())
            }
        }
    }

    fn refusal(&self, stop: Stop) -> Refusal {
        match stop {
            Stop::Refused(refusal) => refusal,
            Stop::Jiter(error) => {
                let place = self.json.error_position(error.index);
                let (what, line, column) = (error.error_type, place.line, place.column);
                Refusal::Invalid(format!("{what} at line {line} column {column}"))
            }
        }
    }
}

fn refuse_twice(entries: &[(Box<str>, Value<'_>)]) -> Result<(), Stop> {
    let mut seen = HashSet::with_capacity(entries.len());
    match entries.iter().find(|(key, _)| !seen.insert(&**key)) {
        Some((key, _)) => Err(Refusal::Twice(key.to_string()).into()),
        None => Ok(()),
    }
}
