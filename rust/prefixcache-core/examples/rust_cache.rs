//! A toy engine around the cache in Rust: `cargo run --package prefixcache-core --example rust_cache`.
//!
//! Its model reads all KV before a token through the block table, so that a block of another request
//! changes the answer. A warm prompt must get the tokens of a cold one, and with a wrong block table it
//! must not. Another thread probes the cache meanwhile.

use std::error::Error;
use std::thread;

use prefixcache_core::{
    Extras, GroupId, GroupSpec, Groups, HashConfig, PoolConfig, PrefixCache, Scope, Sequence,
    TableBuffers, Writer,
};

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 64;
const NEW_TOKENS: usize = 20;

type Cache = PrefixCache<Writer>;
type Outcome<T> = Result<T, Box<dyn Error>>;

/// Owns the memory of the KV: here a number for each slot.
struct Engine<'a> {
    cache: &'a mut Cache,
    kv: Vec<u32>,
    wrong_table: bool,
}

impl Engine<'_> {
    /// How many tokens of the prompt hit, and [`NEW_TOKENS`] tokens after it.
    fn generate(&mut self, prompt: &[u32]) -> Outcome<(usize, Vec<u32>)> {
        let mut text = prompt.to_vec();
        let mut sequence = self.cache.new_sequence(text.clone(), Scope::default(), Extras::new());
        let hits = self.admit(&mut sequence)?;
        for _ in 0..NEW_TOKENS {
            let token = self.step(&mut sequence, &text)?;
            text.push(token);
            self.cache.append_tokens(&mut [&mut sequence], &[token])?;
            if self.cache.append_slots(&mut [&mut sequence], &[1])? == 0 {
                self.cache.release(&mut [&mut sequence])?;
                return Err("no free block: a larger engine preempts a request here".into());
            }
        }
        self.cache.release(&mut [&mut sequence])?;
        Ok((hits, text.split_off(prompt.len())))
    }

    /// Takes the hits of a prompt and slots for the rest. Its last token is computed in any case.
    fn admit(&mut self, sequence: &mut Sequence) -> Outcome<usize> {
        let count = sequence.num_tokens();
        let most = (count - 1) / BLOCK_SIZE * BLOCK_SIZE;
        let hits = self.cache.count_prefix_hits(sequence)?.min(most);
        let taken = self.cache.commit_prefix_plan(sequence, hits, count - hits)?;
        taken.ok_or_else(|| "no free blocks: a larger engine lets the request wait here".into())
    }

    /// Computes the tokens that have no KV yet; the next token.
    fn step(&mut self, sequence: &mut Sequence, text: &[u32]) -> Outcome<u32> {
        let start = sequence.num_filled();
        let (mut indptr, mut indices, mut last_page_len) = ([0; 2], [0; NUM_BLOCKS], [0; 1]);
        let mut slots = vec![0; text.len() - start];
        let mut buffers = TableBuffers {
            indptr: &mut indptr,
            indices: &mut indices,
            last_page_len: &mut last_page_len,
            slot_mapping: &mut slots,
            first_pages: None,
        };
        let (group, counts) = (GroupId::default(), [text.len() - start]);
        let pages =
            self.cache.fill_block_tables(&[sequence], &[start], &counts, group, &mut buffers)?;
        let pages = &mut indices[..pages];
        pages.rotate_right(usize::from(self.wrong_table));
        let mut next = 0;
        for (position, slot) in (start..).zip(slots) {
            self.kv[slot as usize] = text[position];
            next = self.attend(pages, position);
        }
        self.cache.mark_blocks_filled(&mut [sequence], &[text.len()])?;
        Ok(next)
    }

    /// A number that depends on the KV of each position up to this one, and on their order.
    fn attend(&self, pages: &[i32], position: usize) -> u32 {
        let slot = |at: usize| pages[at / BLOCK_SIZE] as usize * BLOCK_SIZE + at % BLOCK_SIZE;
        let mix = |state: u32, at| state.wrapping_mul(31).wrapping_add(self.kv[slot(at)]);
        (0..=position).fold(0, mix) % 1_000
    }
}

fn new_cache() -> Outcome<Cache> {
    let config = HashConfig::new(BLOCK_SIZE, Groups::new(vec![GroupSpec::FullAttention])?)
        .with_model("toy", "u32", "u32");
    Ok(PrefixCache::new(config, Writer::new(PoolConfig::new(NUM_BLOCKS))?)?)
}

fn new_engine(cache: &mut Cache) -> Engine<'_> {
    let kv = vec![0; NUM_BLOCKS * BLOCK_SIZE];
    Engine { cache, kv, wrong_table: false }
}

fn main() -> Outcome<()> {
    let prompt: Vec<u32> = (0..100).map(|index| 7 * index % 256).collect();
    let (cold_hits, cold) = new_engine(&mut new_cache()?).generate(&prompt)?;

    let mut cache = new_cache()?;
    let reader = cache.reader();
    let hashes = cache.compute_block_hashes(&prompt, &Scope::default(), Extras::new());
    let probe = || (0..10_000).map(|_| reader.probe(&hashes)).max();
    let (answers, seen) = thread::scope(|scope| {
        let watcher = scope.spawn(probe);
        let mut engine = new_engine(&mut cache);
        let mut answers = vec![engine.generate(&prompt), engine.generate(&prompt)];
        engine.wrong_table = true;
        answers.push(engine.generate(&prompt));
        (answers, watcher.join())
    });
    let answers: Vec<_> = answers.into_iter().collect::<Outcome<_>>()?;
    let [(_, first), (hits, warm), (_, wrong)] = &answers[..] else {
        unreachable!("there were three prompts");
    };
    println!("{hits} of {} prompt tokens were hits", prompt.len());
    assert_eq!((cold_hits, *hits), (0, 96));
    assert!(seen.is_ok_and(|most| most <= Some(96)));
    assert_eq!([first, warm], [&cold, &cold]);
    println!("the tokens are those of a cold run");
    assert_ne!(wrong, &cold);
    println!("with a wrong block table they are not");
    Ok(())
}
