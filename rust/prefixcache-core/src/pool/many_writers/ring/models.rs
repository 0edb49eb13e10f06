//! Every interleaving of two or three threads on a ring of four slots, two to a segment.

use loom::sync::Arc;

use super::super::block::{GiveUp, Hold, State};
use super::super::credits::Credits;
use super::*;
use crate::id::Epoch;
use crate::records::Content;
use crate::sync::{faults, in_parallel, model};

const CAPACITY: usize = 4;

struct Line {
    ring: Ring,
    blocks: Vec<Block>,
    credits: Credits,
}

impl Line {
    /// Blocks 1 to `count`, each held once, with content.
    fn new(count: usize) -> Arc<Self> {
        let blocks: Vec<Block> = (0..=count).map(|_| Block::default()).collect();
        for block in &blocks[1..] {
            block.transition_to_allocated();
            let claim = block.transition_to_claimed(State::HELD_ONCE);
            assert_eq!(claim, Transition::Done);
            block.write_content(&Content::default(), Epoch::default(), 1);
            assert!(matches!(block.transition_to_unclaimed(true), GiveUp::StillHeld));
        }
        let ring = Ring::new(Class::DEFAULT, CAPACITY).unwrap();
        Arc::new(Self { ring, blocks, credits: Credits::default() })
    }

    /// Lets the holder of a block put it in line; whether there was a ticket.
    fn release(&self, id: u32) -> bool {
        self.release_to(id, self.ring.reserve(1))
    }

    fn release_to(&self, id: u32, mut tickets: Reservation) -> bool {
        let Some(ticket) = tickets.peek() else {
            return false;
        };
        let block = &self.blocks[id as usize];
        let early = planted(Fault::SlotBeforeState);
        if early {
            self.ring.fill(ticket, BlockId::new(id));
        }
        while let GiveUp::LastHolder(last) = block.transition_to_one_less_held() {
            if block.transition_to_queued(last, last.queued(ticket)) == Transition::Done {
                if !early {
                    self.ring.fill(ticket, BlockId::new(id));
                }
                tickets.advance();
                self.credits.give(1);
                break;
            }
        }
        self.ring.leave_empty(tickets);
        true
    }

    /// Spends tickets on nothing.
    fn skip(&self, count: usize) {
        self.ring.leave_empty(self.ring.reserve(count));
    }

    fn touch(&self, id: u32) -> bool {
        if self.credits.take(1).is_err() {
            return false;
        }
        let touch = self.blocks[id as usize].transition_to_touched(true);
        if let Hold::TakenFromLine(place) = touch {
            self.ring.vacated_slots().add(&self.ring, place.ticket);
        } else {
            self.credits.give(1);
        }
        touch != Hold::Missed
    }

    fn evict(&self, count: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        let count = self.credits.take_some(count);
        let evict = |id: BlockId, place| Some(self.blocks[id.index()].transition_to_evicted(place));
        self.ring.take_oldest(&self.blocks, count, evict, &mut out);
        self.credits.give(count - out.len());
        out
    }

    fn compact(&self) {
        self.ring.compact(&self.blocks, &self.credits, 8);
    }

    /// At rest: the blocks that are not among `held` are in line, and the vacated slots are counted.
    fn check(&self, held: &[BlockId]) {
        let mut all: Vec<BlockId> = self.ring.walk(&self.blocks).map(|(_, id)| id).collect();
        all.extend(held);
        all.sort_unstable();
        let expected: Vec<BlockId> = (1..self.blocks.len() as u32).map(BlockId::new).collect();
        assert_eq!(all, expected, "a block was lost or doubled");
        if !faults::any() {
            self.ring.check_vacated(&self.blocks).unwrap();
        }
    }
}

/// Both of two blocks are being released while a third thread takes what it finds, and looks again.
fn release_with_evict() {
    let line = Line::new(2);
    let releasing = in_parallel(&line, |line| assert!(line.release(1)));
    assert!(line.release(2));
    let mut held = line.evict(1);
    held.extend(line.evict(1));
    releasing.join().unwrap();
    line.check(&held);
}

model!(release_with_evict, fails with PassPending("lost or doubled"), SlotBeforeState("lost or doubled"));

/// A block leaves while its slot is pending; the head passes by the count of vacated slots, and it is
/// handed out again in the next lap.
fn release_with_touch_and_wrap() {
    let line = Line::new(2);
    line.skip(1);
    // A credit for the touch, as the one of the release comes only after its slot is written.
    line.credits.give(1);
    let tickets = line.ring.reserve(1);
    let releasing = in_parallel(&line, |line| assert!(line.release_to(1, tickets)));
    let mut held = Vec::new();
    if line.touch(1) {
        held.push(BlockId::new(1));
        line.ring.skip_vacant(&line.blocks, 2);
    }
    line.skip(3);
    if !line.release(2) {
        held.push(BlockId::new(2));
    }
    releasing.join().unwrap();
    line.check(&held);
}

model!(release_with_touch_and_wrap, fails with BlindSlotStore("lost or doubled"));

/// A cold block holds the head, with vacant slots behind it: the compactor moves it while one thread
/// takes what it finds and another releases into what gets free.
fn compact_with_evict_and_release() {
    let line = Line::new(2);
    assert!(line.release(1));
    line.skip(2);
    // For the compactor, so that the eviction cannot take it away.
    line.credits.give(1);
    let compacting = in_parallel(&line, Line::compact);
    let releasing = in_parallel(&line, |line| line.release(2));
    line.ring.skip_vacant(&line.blocks, 4);
    let mut held = line.evict(1);
    if !releasing.join().unwrap() {
        held.push(BlockId::new(2));
    }
    compacting.join().unwrap();
    line.check(&held);
}

model!(compact_with_evict_and_release, fails with MoveUnopened("lost or doubled"));

/// The compactor reopens a slot in a segment that was all vacant, while another thread skips by the
/// counts and takes what it finds.
fn compact_with_skip() {
    let line = Line::new(1);
    assert!(line.release(1));
    line.skip(3);
    line.credits.give(1);
    let compacting = in_parallel(&line, Line::compact);
    let mut held = Vec::new();
    line.ring.skip_vacant(&line.blocks, 4);
    held.extend(line.evict(1));
    line.ring.skip_vacant(&line.blocks, 4);
    compacting.join().unwrap();
    line.check(&held);
}

model!(compact_with_skip, fails with SkipReopened("lost or doubled"));
