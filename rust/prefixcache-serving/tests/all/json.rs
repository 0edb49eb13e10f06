//! JSON: what is read, and what is refused.

use prefixcache_serving::text::json::{Limits, MAX_DEPTH, Refusal, Value, parse};

const LIMITS: Limits = Limits { numbers: 4, others: 6 };

fn message(text: &[u8]) -> String {
    match parse(text, LIMITS) {
        Err(Refusal::Invalid(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_kind_of_value_is_read() {
    let text = br#"{"a": [1, -2.5e1, 18446744073709551616], "b": "x\u00e4\n"}"#;
    let array = vec![Value::Int(1), Value::Float(-25.0), Value::BigInt("18446744073709551616")];
    let expected = vec![("a".into(), Value::Array(array)), ("b".into(), Value::Str("xä\n".into()))];
    assert_eq!(parse(text, LIMITS), Ok(Value::Object(expected)));
    assert_eq!(parse(b" null ", LIMITS), Ok(Value::Null));
    assert_eq!(parse(b"false", LIMITS), Ok(Value::Bool(false)));
}

#[test]
fn the_limits_are_exact_and_name_the_field() {
    assert!(parse(b"[1, 2, 3, 4]", LIMITS).is_ok());
    assert_eq!(parse(b"[1, 2, 3, 4, 5]", LIMITS), Err(Refusal::TooManyNumbers { field: None }));
    assert!(parse(br#"[[], [], "", {}, null]"#, LIMITS).is_ok());
    let field = Some("k".to_string());
    assert_eq!(
        parse(br#"{"j": 0, "k": {"a": 0, "b": 0, "c": 0, "d": 0}}"#, LIMITS),
        Err(Refusal::TooManyOthers { field })
    );
}

#[test]
fn an_infinite_number_is_refused_by_its_field() {
    for (text, field) in [(&b"[1e999]"[..], None), (br#"{"a": {"b": -1e999}}"#, Some("a"))] {
        let outcome = parse(text, LIMITS);
        assert!(
            matches!(&outcome, Err(Refusal::OutOfRange { field: name, .. }) if name.as_deref() == field)
        );
    }
}

#[test]
fn what_is_too_much_is_refused_where_the_limit_is_passed() {
    assert_eq!(
        parse(b"[1, 2, 3, 4, 5, and this is no JSON", LIMITS),
        Err(Refusal::TooManyNumbers { field: None })
    );
}

#[test]
fn a_key_may_come_once() {
    let text = br#"{"a": {"x": 1, "x": 2}}"#;
    assert_eq!(parse(text, LIMITS), Err(Refusal::Twice("x".into())));
    assert!(parse(br#"{"a": {"b": {"a": 1}}}"#, LIMITS).is_ok());
}

#[test]
fn ambiguous_values_are_refused() {
    for text in [
        &b"NaN"[..],
        br#""\ud800""#,
        br#""\udc00""#,
        b"\"\xff\"",
        b"\"\xed\xa0\x80\"",
        b"01",
        b"1.",
        b"[1,]",
        b"{} {}",
        b"",
    ] {
        message(text);
    }
}

#[test]
fn deep_nesting_ends_before_the_stack_does() {
    let limits = Limits { numbers: 0, others: usize::MAX };
    let deep = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
    assert!(parse(&deep(MAX_DEPTH), limits).is_ok());
    assert!(matches!(parse(&deep(MAX_DEPTH + 1), limits), Err(Refusal::Invalid(_))));
    assert!(parse(&vec![b'['; 1_000_000], limits).is_err());
}
