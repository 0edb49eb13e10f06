//! A layer that is computed in steps, against the obvious sums and against itself.

#[path = "../../../prefixcache-cpu/tests/common/noise.rs"]
mod noise;

use prefixcache_attention::{Attention, BlockTables, KvElement, Plan};
use prefixcache_cpu::{Form, Team};

pub use noise::noise;

pub const PAGES: usize = 128;

/// Tokens of a sequence: its number, and those that are computed.
pub type Chunk = (usize, usize, usize);

/// A layer with its cache. What was never written is NaN, so that reading it shows.
pub trait Layer<E> {
    /// Numbers of a token's input.
    fn inputs(&self) -> usize;

    /// Numbers of a token's output.
    fn outputs(&self) -> usize;

    /// Computes tokens of each sequence, of which there are all rows.
    fn step(&mut self, form: Form, team: &Team, sequences: &[Vec<E>], step: &[Chunk]) -> Vec<E>;

    /// All outputs of a sequence, in `f64`.
    fn reference(&self, x: &[E]) -> Vec<f64>;
}

/// The page of a sequence's block: they are scattered, each in another way.
pub fn page(way: usize, sequence: usize, index: usize) -> i32 {
    (1 + ((sequence * 40 + index) * 37 + 11 * way) % (PAGES - 1)) as i32
}

/// The plan of a step whose tokens see `left` before them. Pages behind those are left out.
pub fn plan(step: &[Chunk], size: usize, left: usize, way: usize) -> Plan {
    let (mut qo_indptr, mut kv_indptr) = (vec![0], vec![0]);
    let (mut kv_indices, mut last_page_len) = (Vec::new(), Vec::new());
    let mut first_pages = Vec::new();
    for &(sequence, from, to) in step {
        let first = from.saturating_sub(left) / size;
        let pages = first..to.div_ceil(size);
        kv_indices.extend(pages.map(|index| page(way, sequence, index)));
        first_pages.push(first as i32);
        kv_indptr.push(kv_indices.len() as i32);
        qo_indptr.push(qo_indptr.last().expect("one") + (to - from) as i32);
        last_page_len.push(((to - 1) % size + 1) as i32);
    }
    let tables = BlockTables {
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &kv_indices,
        last_page_len: &last_page_len,
        first_pages: Some(&first_pages),
    };
    let mut window = Attention::new(1, 1, 16, 1.0).expect("a shape that fits");
    window.window_left = Some(left);
    Plan::new(tables, PAGES, size, &window).expect("a sound step")
}

/// The rows of a step's tokens.
pub fn rows_of<E: Clone>(sequences: &[Vec<E>], step: &[Chunk], width: usize) -> Vec<E> {
    let rows = |&(sequence, from, to): &Chunk| &sequences[sequence][from * width..to * width];
    step.iter().flat_map(rows).cloned().collect()
}

/// Every row is near the reference, and is that of its sequence computed alone in one step. Up to `refused`
/// tokens are computed again.
pub fn check<E: KvElement + PartialEq, L: Layer<E>>(
    form: Form,
    layer: impl Fn() -> L,
    threads: usize,
    (lengths, chunks): (&[usize], &[usize]),
    refused: usize,
    tolerance: f64,
) {
    let (inputs, width) = (layer().inputs(), layer().outputs());
    let sequences: Vec<Vec<E>> = (0..lengths.len())
        .map(|number| noise(number as u64, lengths[number] * inputs))
        .collect();
    let alone = Team::new(1).expect("threads");
    let want: Vec<Vec<E>> = (0..lengths.len())
        .map(|number| layer().step(form, &alone, &sequences, &[(number, 0, lengths[number])]))
        .collect();
    for (got, sequence) in want.iter().zip(&sequences) {
        for (at, (got, exact)) in got.iter().zip(layer().reference(sequence)).enumerate() {
            let error = (f64::from(got.to_f32()) - exact).abs();
            assert!(
                error <= tolerance * exact.abs().max(1.0),
                "{at}: {error} of {exact}"
            );
        }
    }
    let team = Team::new(threads).expect("threads");
    let (mut many, mut done) = (layer(), vec![0; lengths.len()]);
    let mut chunks = chunks.iter().cycle();
    let (mut again, mut steps) = ((1..=refused).cycle(), 0);
    while done != lengths {
        let mut step = Vec::new();
        steps += 1;
        for number in 0..lengths.len() {
            // Every third step computes tokens of the one before again, up to as many as may be.
            let back = if steps % 3 == 0 { again.next() } else { None };
            let from = done[number].saturating_sub(back.unwrap_or(0));
            let to = lengths[number].min(done[number] + chunks.next().expect("a cycle"));
            if to > done[number] {
                step.push((number, from, to));
                done[number] = to;
            }
        }
        let out = many.step(form, &team, &sequences, &step);
        let mut rows = out.chunks_exact(width);
        for &(number, from, to) in &step {
            for position in from..to {
                let want = &want[number][position * width..][..width];
                let same = rows.next().is_some_and(|row| row == want);
                assert!(same, "{form:?}: {number} at {position} of {step:?}");
            }
        }
    }
}
