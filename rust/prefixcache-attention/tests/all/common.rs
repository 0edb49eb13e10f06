//! Layers of one cache in random schedules: against the obvious computation, and against each sequence
//! computed alone in one step, bit for bit.

use prefixcache_attention::{Attention, BlockTables, KvElement, Plan};
use prefixcache_cpu::{Form, Team};

use crate::noise::noise;

/// Tokens of a sequence: its number, and those that are computed.
pub type Chunk = (usize, usize, usize);

/// How many of a chunk's tokens are guesses, and how many wrong ones follow them.
pub type Guesses = [usize; 2];

/// A layer with its pages. What was never written is NaN, so that reading it shows.
pub trait Layer<E> {
    /// How far a number may be from that of the reference, by its type.
    const OF_F32: f64;
    const OF_BF16: f64 = 1e-2;

    /// The widths of an input row and of an output row.
    fn widths(&self) -> [usize; 2];

    /// The outputs of the chunks' tokens, without those of wrong guesses.
    fn step(
        &mut self,
        form: Form,
        team: &Team,
        sequences: &[Vec<E>],
        step: &[Chunk],
        guesses: &[Guesses],
    ) -> Vec<E>;

    /// Outputs of a sequence in `f64`, with their places among all of it.
    fn reference(&self, x: &[E]) -> Vec<(usize, f64)>;
}

/// Where a block of a sequence lies among the pages of a part of the cache: scattered, and never in page 0.
pub fn page(pages: usize, part: usize, sequence: usize, index: usize) -> i32 {
    let block = sequence * (pages / 3) + index;
    (1 + (block * 37 + 11 * part) % (pages - 1)) as i32
}

/// The plan of a step, which lists all pages of a sequence or leaves out those that its tokens do not see.
/// `page` has the chunk's place in the step and the block's number.
pub fn plan(
    (pages, block_size): (usize, usize),
    attention: &Attention,
    leaves_out: bool,
    step: &[Chunk],
    page: impl Fn(usize, usize) -> i32,
) -> Plan {
    let (mut qo_indptr, mut kv_indptr) = (vec![0], vec![0]);
    let (mut kv_indices, mut last_page_len) = (Vec::new(), Vec::new());
    let mut first_pages = Vec::new();
    for (place, &(_, from, to)) in step.iter().enumerate() {
        let first = match leaves_out {
            true => first_page(attention, block_size, from),
            false => 0,
        };
        kv_indices.extend((first..to.div_ceil(block_size)).map(|index| page(place, index)));
        first_pages.push(first as i32);
        kv_indptr.push(kv_indices.len() as i32);
        qo_indptr.push(qo_indptr[place] + (to - from) as i32);
        last_page_len.push(((to - 1) % block_size + 1) as i32);
    }
    let tables = BlockTables {
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &kv_indices,
        last_page_len: &last_page_len,
        first_pages: leaves_out.then_some(&first_pages),
    };
    Plan::new(tables, pages, block_size, attention).expect("a sound step")
}

/// The first page that the token at `position` sees.
pub fn first_page(attention: &Attention, block_size: usize, position: usize) -> usize {
    let left = attention.window_left;
    left.map_or(0, |left| position.saturating_sub(left) / block_size)
}

/// Every row is that of its sequence computed alone in one step. `next` cuts the next chunk of a sequence,
/// from how many of its tokens are done, and its length.
pub fn check<E: KvElement + PartialEq, L: Layer<E>>(
    (form, threads): (Form, usize),
    lengths: &[usize],
    new: impl Fn() -> L,
    many: &mut L,
    mut next: impl FnMut(usize, usize) -> (usize, usize, Guesses),
) {
    let [inputs, width] = many.widths();
    let random = |(number, length): (usize, &usize)| noise(number as u64, length * inputs);
    let sequences: Vec<Vec<E>> = lengths.iter().enumerate().map(random).collect();
    let alone = Team::new(1).expect("threads");
    let whole = |number| [(number, 0, lengths[number])];
    let want: Vec<Vec<E>> = (0..lengths.len())
        .map(|number| new().step(form, &alone, &sequences, &whole(number), &[]))
        .collect();
    let tolerance = if size_of::<E>() == 4 { L::OF_F32 } else { L::OF_BF16 };
    for (got, sequence) in want.iter().zip(&sequences) {
        for (at, exact) in many.reference(sequence) {
            let error = (f64::from(got[at].to_f32()) - exact).abs();
            let most = tolerance * exact.abs().max(1.0);
            assert!(error <= most, "{at}: {error} of {exact}");
        }
    }
    let team = Team::new(threads).expect("threads");
    let mut done = vec![0; lengths.len()];
    while done != lengths {
        let (mut step, mut guessed) = (Vec::new(), Vec::new());
        for (number, done) in done.iter_mut().enumerate() {
            let (from, to, guesses) = next(*done, lengths[number]);
            if to > *done {
                step.push((number, from, to));
                guessed.push(guesses);
                *done = to;
            }
        }
        let out = many.step(form, &team, &sequences, &step, &guessed);
        let mut rows = out.chunks_exact(width);
        for &(number, from, to) in &step {
            for position in from..to {
                let want = &want[number][position * width..][..width];
                let same = rows.next().is_some_and(|row| row == want);
                assert!(same, "{form:?}: {number} at {position} of {step:?}, {guessed:?}");
            }
        }
    }
}
