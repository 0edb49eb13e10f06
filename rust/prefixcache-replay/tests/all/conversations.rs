//! The turns and shared prefixes that the policy finds on public traces, against their definitions.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use prefixcache_core::clock::Clock;
use prefixcache_core::id::BlockHash;
use prefixcache_core::policy::{ReuseQueue, Turn};
use prefixcache_replay::trace::{BlockKey, Request};

use crate::common::public_trace;

/// More blocks than any of the traces has, so that the policy forgets no child.
const BLOCKS: usize = 1 << 19;

/// The ends that the policy remembers.
const ENDS: usize = 1 << 15;

/// What the policy says of a request: its turn, and how many of its blocks are shared.
type Answer = (u8, usize);

/// All that was ever asked, by the blocks' numbers in the trace.
#[derive(Default)]
struct History {
    /// The turn of the first request that ended with a block, and the blocks that requests went on with from it.
    ends: HashMap<BlockKey, (u8, HashSet<BlockKey>)>,
    children: HashMap<BlockKey, HashSet<BlockKey>>,
}

impl History {
    /// One more than the turn of the last request on the way that ended there; the first where requests went on
    /// from that end in different ways.
    fn turn(&mut self, blocks: &[BlockKey]) -> u8 {
        let last = blocks.iter().rposition(|block| self.ends.contains_key(block));
        let Some(at) = last else { return 1 };
        let (turn, next) = self.ends.get_mut(&blocks[at]).unwrap();
        let Some(&block) = blocks.get(at + 1) else {
            return turn.saturating_add(1);
        };
        next.insert(block);
        if next.len() > 1 { 1 } else { turn.saturating_add(1) }
    }

    /// The blocks up to the last one that several different blocks have followed.
    fn shared(&mut self, blocks: &[BlockKey]) -> usize {
        for two in blocks.windows(2) {
            self.children.entry(two[0]).or_default().insert(two[1]);
        }
        let is_branch =
            |block: &BlockKey| self.children.get(block).is_some_and(|next| next.len() > 1);
        let inner = &blocks[..blocks.len().saturating_sub(1)];
        inner.iter().rposition(is_branch).map_or(0, |at| at + 1)
    }

    fn end(&mut self, blocks: &[BlockKey], turn: u8) {
        if let Some(&last) = blocks.last() {
            self.ends.entry(last).or_insert((turn, HashSet::new()));
        }
    }
}

/// Names of a trace's blocks that no table of the policy confuses: those of ends lie in slots of their own.
struct Names(Vec<u32>);

impl Names {
    /// Blocks of a PTT trace are numbered from 0.
    fn new(requests: &[Request]) -> Self {
        let all = requests.iter().flat_map(|one| &one.blocks);
        let most = all.max().map_or(0, |&most| most as usize);
        let mut names = vec![u32::MAX; most + 1];
        let ends = requests.iter().flat_map(|one| [one.prompt().last(), one.blocks.last()]);
        let mut count = 0;
        for &end in ends.flatten() {
            if names[end as usize] == u32::MAX {
                names[end as usize] = count;
                count += 1;
            }
        }
        assert!(count as usize <= ENDS, "{count} ends have no slot each");
        let others = names.iter_mut().filter(|name| **name == u32::MAX);
        others.zip(ENDS as u32..).for_each(|(name, number)| *name = number);
        Self(names)
    }

    fn of(&self, block: BlockKey) -> BlockHash {
        let name = self.0[block as usize];
        let word = u64::from(name) | u64::from(name + 1) << 40;
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&word.to_le_bytes());
        BlockHash::from_bytes(bytes)
    }
}

/// Asks both of each request, in the order of the trace.
fn answers(requests: &[Request]) -> impl Iterator<Item = (Answer, Answer)> {
    let names = Names::new(requests);
    let policy = ReuseQueue::new(BLOCKS, Clock::default()).unwrap();
    policy.set_time(Duration::ZERO);
    let mut history = History::default();
    requests.iter().map(move |request| {
        let (prompt, all) = (request.prompt(), &request.blocks);
        let hashes: Vec<BlockHash> = all.iter().map(|&block| names.of(block)).collect();
        let turn: Turn = policy.begin(&hashes[..prompt.len()]);
        let shared = policy.count_shared(&hashes);
        policy.end(&hashes, turn, prompt.len(), shared);
        let expected = history.turn(prompt);
        let expected_shared = history.shared(all);
        history.end(prompt, expected);
        history.end(all, expected);
        ((turn.get(), shared), (expected, expected_shared))
    })
}

#[test]
fn turns_and_shared_prefixes_are_their_definitions() {
    for name in ["mooncake_conv", "taubench"] {
        let (requests, _) = public_trace(&format!("{name}.ptt.gz"));
        let (mut later, mut sharing) = (0, 0);
        for (number, (found, expected)) in answers(&requests).enumerate() {
            assert_eq!(found, expected, "{name}, request {number}");
            later += usize::from(found.0 > 1);
            sharing += usize::from(found.1 > 0);
        }
        assert!(later > 500 && sharing > 500, "{name}: {later} later turns, {sharing} share");
    }
}
