//! Stop strings against a search for every one of them everywhere.

use prefixcache_serving::text::stops::{Match, StopStrings};
use proptest::prelude::*;

/// What the automaton must find, by looking for every stop string everywhere.
fn plain_match(stops: &[String], before: &str, text: &str) -> Option<Match> {
    let whole: Vec<char> = format!("{before}{text}").chars().collect();
    let seen = before.chars().count();
    let places = (0..whole.len()).flat_map(|start| (0..stops.len()).map(move |i| (start, i)));
    let ends = |start: usize, i: usize| {
        let stop: Vec<char> = stops[i].chars().collect();
        whole[start..].starts_with(&stop).then(|| start + stop.len())
    };
    places
        .filter(|&(start, i)| ends(start, i).is_some_and(|end| end > seen))
        .map(|(start, stop)| Match { start: start.cast_signed() - seen.cast_signed(), stop })
        .next()
}

fn plain_held(stops: &[String], text: &str) -> usize {
    let chars: Vec<char> = text.chars().collect();
    let begins = |tail: &String| stops.iter().any(|stop| stop.starts_with(tail.as_str()));
    (0..chars.len())
        .map(|start| chars[start..].iter().collect::<String>())
        .find(begins)
        .map_or(0, |tail| tail.chars().count())
}

proptest! {
    #[test]
    fn it_finds_what_the_plain_search_finds(
        stops in prop::collection::vec("[abä🦙]{1,4}", 1..5),
        pieces in prop::collection::vec("[abä🦙]{0,5}", 0..6),
    ) {
        let automaton = StopStrings::new(&stops).unwrap();
        let mut place = automaton.begin();
        let mut before = String::new();
        for piece in pieces {
            let found = automaton.push(&mut place, &piece);
            prop_assert_eq!(found, plain_match(&stops, &before, &piece));
            if found.is_some() {
                break;
            }
            before += &piece;
            prop_assert_eq!(automaton.num_held(place), plain_held(&stops, &before));
        }
    }
}
