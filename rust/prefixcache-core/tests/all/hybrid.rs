//! Full attention and sliding windows over one pool: what a request holds, what hits, what stays behind.

use prefixcache_core::cache::PrefixCache;
use prefixcache_core::cache::tables::TableBuffers;
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::id::{BlockKey, GroupId};
use prefixcache_core::pool::Writer;
use prefixcache_core::sequence::Sequence;
use prefixcache_core::sequence::retention::{Pins, Retention};
use prefixcache_core::store::sealed::Inner;
use prefixcache_core::store::{BlockStore, Lookup, PoolConfig};

use crate::{allocate, fill};

const SIZE: usize = 4;
const FULL: GroupSpec = GroupSpec::FullAttention;
/// A hit needs two blocks of it.
const WINDOW: GroupSpec = GroupSpec::SlidingWindow { window: 8 };
const STATE: GroupSpec = GroupSpec::State;
const ANCHORS: Retention = Retention::Anchors { interval: 0, pins: None };
const PINNED: Retention = Retention::Anchors { interval: 0, pins: Some(Pins::new(0, true)) };

type Cache = PrefixCache<Writer>;

fn cache(groups: &[GroupSpec], block_size: usize, num_blocks: usize) -> Cache {
    let config = HashConfig::new(block_size, Groups::new(groups.to_vec()).unwrap());
    let pool = PoolConfig::new(num_blocks + 1);
    let pool = Writer::new(pool).unwrap();
    PrefixCache::new(config, pool).unwrap()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|place| seed * 1_000 + place).collect()
}

/// Serves a request as a scheduler does: chunk by chunk, what is behind dropped before the next one, and
/// an anchor at the last full block before the prompt's last token. Returns its hit.
fn serve(
    cache: &mut Cache,
    tokens: &[u32],
    retention: Retention,
    chunk: usize,
) -> (usize, Sequence) {
    serve_in(Scope::default(), cache, tokens, retention, chunk)
}

fn serve_in(
    scope: Scope,
    cache: &mut Cache,
    tokens: &[u32],
    retention: Retention,
    chunk: usize,
) -> (usize, Sequence) {
    let len = tokens.len();
    let mut sequence = cache.new_sequence(tokens.to_vec(), scope, vec![]);
    sequence.set_retention(retention);
    sequence.add_prompt_end(len - 1);
    let hits = cache.count_prefix_hits_within(&mut sequence, len - 1);
    let hits = hits.unwrap();
    let plan = cache.commit_in_chunks(&mut sequence, hits, len - hits, chunk);
    assert_eq!(plan, Ok(Some(hits)));
    let mut computed = hits;
    while computed < len {
        let upto = len.min(computed + chunk);
        let batch = &mut [&mut sequence];
        cache.drop_unneeded(batch, &[computed]).unwrap();
        assert_eq!(cache.ensure_slots(batch, &[upto]), Ok(1));
        cache.keep_snapshots(batch, &[computed]).unwrap();
        cache.mark_blocks_filled(batch, &[upto]).unwrap();
        computed = upto;
    }
    (hits, sequence)
}

/// Serves a request to its end; its hit.
fn finish(cache: &mut Cache, tokens: &[u32], retention: Retention) -> usize {
    let (hits, mut sequence) = serve(cache, tokens, retention, 8);
    cache.pin_anchors(&[&mut sequence]).unwrap();
    cache.release(&mut [&mut sequence]).unwrap();
    cache.validate().unwrap();
    hits
}

fn cached_blocks(cache: &mut Cache) -> usize {
    cache.store().cached_blocks().len()
}

fn probe(cache: &mut Cache, tokens: &[u32]) -> usize {
    let hashes = cache.compute_block_hashes(tokens, &Scope::default(), vec![]);
    cache.probe_within(&hashes, tokens.len() - 1)
}

#[test]
fn a_long_prompt_holds_a_window_and_a_chunk_in_each_window_group() {
    let window = GroupSpec::SlidingWindow { window: 1024 };
    let mut cache = cache(&[FULL, window, window], 16, 2200);
    let tokens = prompt(1, 28_000);
    // The full group's 1,750 blocks; in each other 64 of the window, one below, 32 of the chunk, and one.
    assert_eq!(cache.most_blocks(28_000, 512), 1750 + 2 * (64 + 1 + 32 + 1));
    let (_, mut sequence) = serve(&mut cache, &tokens, ANCHORS, 512);
    let held = |group| {
        let table = sequence.block_table(group).iter();
        table.filter(|block| !block.is_null()).count()
    };
    assert_eq!(held(0), 1750);
    // The last chunk has 22 blocks.
    assert!((65 + 22..=98).contains(&held(1)), "{} held", held(1));
    assert_eq!(cache.store().stats().in_use, held(0) + 2 * held(1));
    cache.release(&mut [&mut sequence]).unwrap();
}

#[test]
fn a_hit_needs_all_of_the_full_group_and_the_window_before_its_end() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
    let tokens = prompt(1, 32);
    finish(&mut cache, &tokens, Retention::Everything);
    assert_eq!(probe(&mut cache, &tokens), 28, "a token is left to compute");
    assert_eq!(probe(&mut cache, &tokens[..13]), 12);
    // Blocks 0 to 3 of the window's group were dropped first, and are lost first.
    let others = allocate(cache.inner_mut(), 48 + 4);
    assert_eq!(probe(&mut cache, &tokens), 28);
    assert_eq!(probe(&mut cache, &tokens[..25]), 24);
    assert_eq!(probe(&mut cache, &tokens[..21]), 0, "its window is gone");
    let mut shorter = cache.new_sequence(tokens.clone(), Scope::default(), vec![]);
    assert_eq!(cache.commit_prefix_plan(&mut shorter, 28, 4), Ok(Some(28)));
    let null = |group: usize| shorter.block_table(group).iter().filter(|b| b.is_null()).count();
    assert_eq!((null(0), null(1)), (0, 5));
    cache.release(&mut [&mut shorter]).unwrap();
    // A commit of fewer blocks than were counted derives a length that holds.
    assert_eq!(cache.commit_prefix_plan(&mut shorter, 20, 4), Ok(Some(0)));
    cache.release(&mut [&mut shorter]).unwrap();
    cache.inner_mut().release(&others).unwrap();
}

/// Where a sequence holds blocks of a group.
fn places(sequence: &Sequence, group: usize) -> Vec<usize> {
    let table = sequence.block_table(group).iter().enumerate();
    let held = table.filter(|(_, block)| !block.is_null());
    held.map(|(place, _)| place).collect()
}

#[test]
fn a_state_has_blocks_where_chunks_end_and_where_requests_may_begin() {
    let mut cache = cache(&[STATE, FULL, STATE], SIZE, 100);
    let tokens = prompt(1, 64);
    let retention = Retention::Anchors { interval: 44, pins: None };
    let (_, mut first) = serve(&mut cache, &tokens, retention, 32);
    // Chunks end in blocks 7 and 15. Each anchor, at 44 and before the last token, needs the block before it.
    for group in [0, 2] {
        assert_eq!(places(&first, group), [7, 10, 14, 15]);
    }
    assert_eq!(cache.store().stats().in_use, 16 + 2 * 4);
    cache.validate_holds(&[&first], &Default::default()).unwrap();
    cache.release(&mut [&mut first]).unwrap();
    let hits = [64, 63, 57, 52, 45, 43, 40, 33, 32].map(|len| probe(&mut cache, &tokens[..len]));
    assert_eq!(hits, [60, 60, 44, 44, 44, 32, 32, 32, 0]);
}

#[test]
fn a_step_of_a_state_begins_and_ends_in_a_block() {
    let mut cache = cache(&[STATE], SIZE, 20);
    let mut sequence = cache.new_sequence(prompt(1, 40), Scope::default(), vec![]);
    assert_eq!(cache.commit_in_chunks(&mut sequence, 0, 40, 24), Ok(Some(0)));
    assert_eq!(places(&sequence, 0), [5]);
    let fill = |cache: &Cache, sequence: &Sequence, start, count| {
        let mut indices = [0; 8];
        let mut buffers = TableBuffers {
            indptr: &mut [0; 2],
            indices: &mut indices,
            last_page_len: &mut [0],
            slot_mapping: &mut [0; 40],
            first_pages: None,
        };
        let pages =
            cache.fill_block_tables(&[sequence], &[start], &[count], GroupId::new(0), &mut buffers);
        pages.map(|pages| indices[..pages].iter().map(|&page| page != 0).collect::<Vec<_>>())
    };
    let all = [false, false, false, false, false, true];
    assert_eq!(fill(&cache, &sequence, 0, 24), Ok(all.to_vec()));
    assert!(fill(&cache, &sequence, 0, 18).is_err(), "it ends in the null block");
    assert_eq!(cache.ensure_slots(&mut [&mut sequence], &[18]), Ok(1));
    assert_eq!(fill(&cache, &sequence, 0, 18), Ok(vec![false, false, false, false, true]));
    assert!(fill(&cache, &sequence, 9, 9).is_err(), "the state before it is nowhere");
}

#[test]
fn no_request_waits_for_blocks_of_snapshots() {
    // The groups' most blocks, and what a chunk ends in next to a snapshot that takes twice its blocks.
    let (groups, tokens) = ([FULL, STATE, STATE], prompt(1, 64));
    let most = cache(&groups, SIZE, 100).most_blocks(64, 32);
    assert_eq!(most, 16 + 2 * 3);
    let (_, alone) = serve(&mut cache(&groups, SIZE, 18), &tokens, ANCHORS, 64);
    assert_eq!(places(&alone, 1), [15]);
    let (_, roomy) = serve(&mut cache(&groups, SIZE, 22), &tokens, ANCHORS, 64);
    assert_eq!(places(&roomy, 1), [14, 15]);
    for size in most..most + 12 {
        serve(&mut cache(&groups, SIZE, size), &tokens, Retention::Everything, 32);
    }
}

/// Takes blocks until `left` cached ones are left, and gives them back without content.
fn press(cache: &mut Cache, left: usize) {
    let count = cache.store().num_free() - left;
    let others = allocate(cache.inner_mut(), count);
    cache.inner_mut().release(&others).unwrap();
    assert_eq!(cached_blocks(cache), left);
}

#[test]
fn a_hit_of_two_tiers_takes_what_is_there_and_new_blocks_for_what_it_needs_besides() {
    let mut cache = cache(&[FULL, WINDOW, STATE], SIZE, 40);
    let tokens = prompt(1, 30);
    let mut head = cache.new_sequence(tokens[..16].to_vec(), Scope::default(), vec![]);
    cache.commit_prefix_plan(&mut head, 0, 16).unwrap();
    cache.mark_blocks_filled(&mut [&mut head], &[16]).unwrap();
    let mut sequence = cache.new_sequence(tokens, Scope::default(), vec![]);
    let keys: Vec<_> = sequence.hashes().iter().map(|hash| hash.short()).collect();
    let place = |key: &BlockKey| keys.iter().position(|&short| short == key.hash.short());
    // Of the window places 4 and 5 are needed, of the state place 5.
    let count = |cache: &Cache, sequence: &mut Sequence, absent: (u16, usize)| {
        let is_there = |key: &BlockKey| (key.group.get(), place(key).unwrap()) != absent;
        cache.count_hits_with(sequence, 25, is_there).unwrap()
    };
    assert_eq!(count(&cache, &mut sequence, (2, 4)), (24, 2 + 2 + 1));
    assert_eq!(count(&cache, &mut sequence, (2, 5)), (20, 1 + 1 + 1));
    assert_eq!(count(&cache, &mut sequence, (1, 4)), (16, 0));
    assert_eq!(count(&cache, &mut sequence, (0, 4)), (16, 0));
    let free = cache.store().num_free();
    assert_eq!(cache.commit_missing(&mut sequence, 24, 200, 200), Ok(None));
    assert_eq!(cache.store().num_free(), free);
    let missing = cache.commit_missing(&mut sequence, 24, 6, 6).unwrap();
    let missing = missing.unwrap();
    let at = missing.iter().map(|one| (one.index, one.key.group.get()));
    let at: Vec<_> = at.collect();
    assert_eq!(at, [(4, 0), (4, 1), (5, 0), (5, 1), (5, 2)]);
    for one in &missing {
        let table = sequence.block_table(one.key.group.index());
        assert_eq!(table[one.index], one.block);
        assert_eq!(place(&one.key), Some(one.index));
    }
    assert_eq!(sequence.block_table(0)[..4], head.block_table(0)[..4]);
    assert_eq!(places(&sequence, 1), [4, 5, 6, 7]);
    assert_eq!(places(&sequence, 2), [5, 7]);
    assert_eq!((sequence.num_filled(), sequence.num_ready_slots()), (16, 30));
    cache.mark_blocks_filled(&mut [&mut sequence], &[24]).unwrap();
    cache.release(&mut [&mut head, &mut sequence]).unwrap();
    cache.validate().unwrap();
    assert_eq!(cache.count_prefix_hits(&mut sequence), Ok(24));
}

#[test]
fn a_snapshot_goes_first_once_one_request_went_on_from_it_and_stays_where_prompts_part() {
    let first = prompt(1, 17);
    let longer = |seed| [&first[..], &prompt(seed, 16)].concat();
    // Blocks of keys and values, and snapshots: of the two prompts' ends, and where they part.
    for (requests, kept, hit) in [(1, 8 + 1, 0), (2, 8 + 4 + 3, 16)] {
        let mut cache = cache(&[FULL, STATE], SIZE, 100);
        finish(&mut cache, &first, ANCHORS);
        for seed in 0..requests {
            assert_eq!(finish(&mut cache, &longer(2 + seed), ANCHORS), 16);
        }
        press(&mut cache, kept);
        assert_eq!(probe(&mut cache, &first), hit);
        assert_eq!(probe(&mut cache, &longer(2)), 32);
    }
}

/// Serves a prompt and an answer of these tokens, which may be none.
fn finish_with_answer(scope: &Scope, cache: &mut Cache, tokens: &[u32], answer: &[u32]) {
    let (_, mut sequence) = serve_in(scope.clone(), cache, tokens, ANCHORS, 8);
    sequence.extend(answer);
    let upto = [sequence.num_tokens()];
    let batch = &mut [&mut sequence];
    cache.ensure_slots(batch, &upto).unwrap();
    cache.mark_blocks_filled(batch, &upto).unwrap();
    cache.drop_unneeded(batch, &upto).unwrap();
    cache.release(batch).unwrap();
}

#[test]
fn the_end_that_requests_do_not_go_on_from_goes_before_other_content() {
    // It ends with a block, where its last step ends.
    let answer = prompt(70, 11);
    let other = prompt(60, 17);
    for (keeps_answers, hits) in [(true, [0, 28]), (false, [16, 16])] {
        let mut cache = cache(&[FULL, STATE], SIZE, 800);
        let turn = |seed, keeps_answers| match keeps_answers {
            true => [prompt(seed, 17), answer.clone(), prompt(80, 16)].concat(),
            false => [prompt(seed, 17), prompt(80, 20)].concat(),
        };
        let own = Scope::default();
        let salted = Scope { cache_salt: Some("b".into()), ..Scope::default() };
        // What others do says nothing.
        for (scope, keeps_answers, seeds) in
            [(&salted, !keeps_answers, 1..40), (&own, keeps_answers, 1..12)]
        {
            for seed in seeds {
                finish_with_answer(scope, &mut cache, &prompt(seed, 17), &answer);
                finish_with_answer(scope, &mut cache, &turn(seed, keeps_answers), &[]);
            }
        }
        cache.clear_cache_index();
        finish(&mut cache, &other, ANCHORS);
        finish_with_answer(&own, &mut cache, &prompt(50, 17), &answer);
        // The keys and values of both, and a snapshot of each.
        press(&mut cache, 4 + 7 + 2);
        assert_eq!(probe(&mut cache, &other), 16);
        let next = [&prompt(50, 17)[..], &answer, &[7]].concat();
        let asked = [prompt(50, 17), next];
        assert_eq!(asked.map(|tokens| probe(&mut cache, &tokens)), hits);
    }
}

#[test]
fn all_stays_behind_a_window_while_there_is_room() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
    let shared = prompt(1, 24);
    let request = |suffix: u32| [shared.clone(), prompt(suffix, 20)].concat();
    finish(&mut cache, &request(2), ANCHORS);
    assert_eq!(finish(&mut cache, &request(3), ANCHORS), 24);
    assert_eq!(finish(&mut cache, &request(4), ANCHORS), 24);
    // What was hit there is needed again, and outlasts what was not.
    press(&mut cache, 6 + 3 * 5 + 2 + 3 * 3);
    assert_eq!(probe(&mut cache, &request(5)), 24);
}

#[test]
fn anchors_alone_stay_behind_a_window_under_pressure() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
    let mut tokens = prompt(1, 34);
    finish(&mut cache, &tokens, ANCHORS);
    assert_eq!(cached_blocks(&mut cache), 8 + 8);
    press(&mut cache, 8 + 3);
    // Eight full blocks, and the last three of the window: two, and one below.
    assert_eq!(cached_blocks(&mut cache), 8 + 3);
    assert_eq!(probe(&mut cache, &tokens), 32, "the same prompt again");
    tokens[30] = 0;
    assert_eq!(probe(&mut cache, &tokens), 28, "edited in its last full block");
    tokens[25] = 0;
    assert_eq!(probe(&mut cache, &tokens), 0, "edited before what was kept");
}

#[test]
fn a_junction_repairs_what_the_windows_lost() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 128);
    let shared = prompt(1, 24);
    let request = |suffix: u32| [shared.clone(), prompt(suffix, 20)].concat();
    finish(&mut cache, &request(2), ANCHORS);
    press(&mut cache, 11 + 3);
    // The second finds the full group alone, and makes the junction its anchor.
    let second = request(3);
    assert_eq!(probe(&mut cache, &second), 0);
    let mut sequence = cache.new_sequence(second, Scope::default(), vec![]);
    sequence.set_retention(ANCHORS);
    sequence.add_anchor(24);
    cache.commit_prefix_plan(&mut sequence, 0, 44).unwrap();
    fill(&mut cache, &mut sequence);
    cache.drop_unneeded(&mut [&mut sequence], &[44]).unwrap();
    cache.release(&mut [&mut sequence]).unwrap();
    assert_eq!(probe(&mut cache, &request(4)), 24, "the third stands there");
}

#[test]
fn multiples_of_the_interval_are_anchors_whatever_the_chunks() {
    for chunk in [1, 3, 8, 40] {
        let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
        let retention = Retention::Anchors { interval: 16, pins: None };
        let tokens = prompt(1, 40);
        let (_, mut sequence) = serve(&mut cache, &tokens, retention, chunk);
        cache.drop_unneeded(&mut [&mut sequence], &[40]).unwrap();
        cache.release(&mut [&mut sequence]).unwrap();
        press(&mut cache, 10 + 8);
        let hits: Vec<usize> =
            (1..=10).map(|blocks| probe(&mut cache, &tokens[..blocks * SIZE])).collect();
        // Lengths of 4 blocks (16 tokens), of 8, and of 9 and 10 at the end; of one less each.
        let expected = [0, 0, 0, 12, 16, 16, 16, 28, 32, 36];
        assert_eq!(hits, expected, "chunks of {chunk}");
    }
}

#[test]
fn what_was_a_hit_or_is_held_by_others_keeps_its_content() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
    let shared = prompt(1, 17);
    finish(&mut cache, &shared, ANCHORS);
    let longer = [&shared[..], &prompt(2, 30)[..]].concat();
    assert_eq!(finish(&mut cache, &longer, ANCHORS), 16);
    assert_eq!(probe(&mut cache, &shared), 16, "the second moved on past its hit");
    // Two at once: the one that drops a block first leaves it to the other.
    let (_, mut first) = serve(&mut cache, &prompt(3, 8), ANCHORS, 8);
    let (hits, mut second) = serve(&mut cache, &prompt(3, 9), ANCHORS, 8);
    assert_eq!(hits, 8);
    for token in 8..40 {
        cache.append_tokens(&mut [&mut first], &[7]).unwrap();
        let batch = &mut [&mut first];
        cache.append_slots(batch, &[1]).unwrap();
        cache.mark_blocks_filled(batch, &[token + 1]).unwrap();
        cache.drop_unneeded(batch, &[token + 1]).unwrap();
    }
    assert!(first.block_table(1)[0].is_null());
    cache.release(&mut [&mut first, &mut second]).unwrap();
    assert_eq!(probe(&mut cache, &prompt(3, 9)), 8);
}

#[test]
fn pinned_anchors_outlast_a_flood_and_nothing_waits_for_them() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 60);
    let tokens = prompt(1, 40);
    finish(&mut cache, &tokens, PINNED);
    // The full group's ten, and the windows of the prompt's end and of what follows it.
    assert_eq!(cache.store().stats().pinned_free, 10 + 4);
    for seed in 2..12 {
        finish(&mut cache, &prompt(seed, 60), Retention::Everything);
    }
    assert_eq!(probe(&mut cache, &tokens), 36);
    assert_eq!(finish(&mut cache, &tokens, ANCHORS), 36);
    assert_eq!(cache.store().stats().pinned_free, 14, "a hit takes no pin");
    // A request that needs the whole pool starts.
    let mut all = cache.new_sequence(prompt(20, 120), Scope::default(), vec![]);
    assert_eq!(cache.commit_prefix_plan(&mut all, 0, 120), Ok(Some(0)));
    assert_eq!(cache.store().num_free(), 0);
    cache.release(&mut [&mut all]).unwrap();
}

#[test]
fn what_the_full_group_has_is_distinguished_from_what_the_windows_lost() {
    let mut cache = cache(&[FULL, WINDOW, FULL], SIZE, 96);
    let tokens = prompt(1, 40);
    finish(&mut cache, &tokens, ANCHORS);
    press(&mut cache, 2 * 10 + 4);
    let mut shared = cache.new_sequence(tokens[..25].to_vec(), Scope::default(), vec![]);
    assert_eq!(cache.count_prefix_hits(&mut shared), Ok(0), "no window to stand on");
    assert_eq!(cache.count_whole_hits(&mut shared, usize::MAX), Ok(24));
    assert_eq!(cache.count_whole_hits(&mut shared, 23), Ok(20));
    let mut windows = prompt(1, 40);
    windows[20] = 7;
    let mut other = cache.new_sequence(windows, Scope::default(), vec![]);
    assert_eq!(cache.count_whole_hits(&mut other, usize::MAX), Ok(20));
    let mut alone = self::cache(&[WINDOW], SIZE, 64);
    finish(&mut alone, &tokens, Retention::Everything);
    let mut same = alone.new_sequence(tokens, Scope::default(), vec![]);
    assert_eq!(alone.count_prefix_hits(&mut same), Ok(40));
    assert_eq!(alone.count_whole_hits(&mut same, usize::MAX), Ok(0), "no group is full");
}

#[test]
fn a_block_given_up_for_its_duplicate_pushes_out_no_other() {
    let mut cache = cache(&[FULL], SIZE, 8);
    let tokens = prompt(1, 8);
    finish(&mut cache, &prompt(2, 16), Retention::Everything);
    let mut both = [1, 2].map(|_| cache.new_sequence(tokens.clone(), Scope::default(), vec![]));
    for sequence in &mut both {
        assert_eq!(cache.commit_prefix_plan(sequence, 0, 8), Ok(Some(0)));
    }
    let [first, second] = &mut both;
    let batch = &mut [&mut *first, &mut *second];
    for duplicate in cache.mark_blocks_filled(batch, &[8, 8]).unwrap() {
        let own = &mut *batch[duplicate.sequence];
        cache.replace_block(own, duplicate.group, duplicate.index).unwrap();
    }
    assert_eq!(first.block_table(0), second.block_table(0));
    cache.release(&mut [first, second]).unwrap();
    cache.validate().unwrap();
    // Two blocks more fit without a loss, where the copies were.
    allocate(cache.inner_mut(), 2);
    assert_eq!((probe(&mut cache, &prompt(2, 17)), probe(&mut cache, &prompt(1, 9))), (16, 8));
}

#[test]
fn a_block_whose_duplicate_was_evicted_stays() {
    let mut cache = cache(&[FULL], SIZE, 16);
    let mut both = [1, 2].map(|_| cache.new_sequence(prompt(1, 8), Scope::default(), vec![]));
    for sequence in &mut both {
        assert_eq!(cache.commit_prefix_plan(sequence, 0, 8), Ok(Some(0)));
    }
    let [first, second] = &mut both;
    cache.mark_blocks_filled(&mut [&mut *first], &[8]).unwrap();
    let duplicates = cache.mark_blocks_filled(&mut [&mut *second], &[8]).unwrap();
    cache.release(&mut [first]).unwrap();
    let own = second.block_table(0).to_vec();
    cache.inner_mut().set_max_cached(Some(0));
    for duplicate in duplicates {
        cache.replace_block(second, duplicate.group, duplicate.index).unwrap();
    }
    assert_eq!(second.block_table(0), own);
    cache.release(&mut [second]).unwrap();
    cache.validate().unwrap();
}

#[test]
fn an_anchor_close_to_the_one_before_is_not_pinned() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
    let retention = Retention::Anchors { interval: 0, pins: Some(Pins::new(9, false)) };
    finish(&mut cache, &prompt(1, 40), retention);
    // The prompt's last full block lies nine blocks past nothing, its end one further.
    assert_eq!(cache.store().stats().pinned_free, 3);
    assert_eq!(cached_blocks(&mut cache), 10 + 10);
    press(&mut cache, 10 + 4);
    assert_eq!(cache.store().stats().pinned_free, 3);
}

#[test]
fn an_aborted_request_pins_nothing_more() {
    let mut cache = cache(&[FULL, WINDOW], SIZE, 64);
    let (_, mut sequence) = serve(&mut cache, &prompt(1, 40), PINNED, 8);
    cache.release(&mut [&mut sequence]).unwrap();
    assert_eq!(cache.store().stats().pinned_free, 0);
    cache.validate().unwrap();
}

#[test]
fn layouts_of_other_windows_share_nothing() {
    let layout = |groups: &[GroupSpec]| Groups::new(groups.to_vec()).unwrap().layout();
    assert_eq!(layout(&[FULL, WINDOW]), "full,sliding_window:8");
    let tokens = prompt(1, 8);
    let hashes = |groups| {
        let cache = cache(groups, SIZE, 8);
        let hashes = cache.compute_block_hashes(&tokens, &Scope::default(), vec![]);
        hashes.as_slice().to_vec()
    };
    let other = GroupSpec::SlidingWindow { window: 9 };
    assert_ne!(hashes(&[FULL, WINDOW]), hashes(&[FULL, other]));
}
