//! The kernel against the obvious computation, and against itself: the same bits for a row however
//! the tokens around it are cut into steps.

use prefixcache_attention::{Attention, KvElement, KvPagesMut, attend};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};
use proptest::prelude::*;

use crate::cases::cases;
use crate::common::{self, Chunk, Guesses, Layer as _, first_page, page, plan};
use crate::noise::noise;

const PAGES: usize = 256;

/// Numbers of another layer between the pages of this one.
const BETWEEN: usize = 16;

/// A layer that gives away the pages behind its window. A token's row has its queries, keys and values.
struct Layer<E> {
    attention: Attention,
    block_size: usize,
    /// Whether steps list the pages alone that their tokens see.
    leaves_out: bool,
    cache: Cache<E>,
}

/// Numbers that are NaN, or codes whose scales are, where nothing was written.
enum Cache<E> {
    Numbers(Vec<E>),
    Codes(Vec<u8>),
}

/// What keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    Numbers,
    Codes,
}

impl<E: KvElement> Layer<E> {
    fn new(attention: Attention, (kept, block_size): (Kept, usize), leaves_out: bool) -> Self {
        let numbers = 2 * block_size * attention.kv_heads() * attention.head_dim();
        let cache = match kept {
            Kept::Numbers => {
                Cache::Numbers(vec![E::from_f32(f32::NAN); PAGES * (BETWEEN + numbers)])
            }
            Kept::Codes => {
                Cache::Codes(vec![0xff; PAGES * (BETWEEN + attention.code_bytes(block_size))])
            }
        };
        Self { attention, block_size, leaves_out, cache }
    }

    /// The keys and values that are read of a row of inputs.
    fn rounded(&self, mut x: Vec<f64>) -> Vec<f64> {
        if matches!(self.cache, Cache::Codes(_)) {
            let (heads, kv_heads) = (self.attention.heads(), self.attention.kv_heads());
            let rows = x.chunks_exact_mut(self.attention.head_dim()).skip(heads);
            for (number, head) in rows.enumerate() {
                let block = if number < kv_heads { 1 << head.len().trailing_zeros() } else { 1 };
                head.chunks_exact_mut(block).for_each(rotate);
                let largest = head.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
                let scale = largest as f32 / 127.0;
                // Divided in f32: in f64 what is nearly a half would go the other way.
                let code = |x: f64| f64::from((x as f32 / scale).round_ties_even());
                head.iter_mut().for_each(|x| *x = code(*x) * f64::from(scale));
                head.chunks_exact_mut(block).for_each(rotate);
                // Twice rotated is as many times the row.
                head.iter_mut().for_each(|x| *x /= block as f64);
            }
        }
        x
    }
}

/// Multiplies with a Hadamard matrix, by its definition. What is added is rounded as the kernel does, whose codes
/// would not be the same otherwise.
fn rotate(x: &mut [f64]) {
    if x.len() == 1 {
        return;
    }
    let (left, right) = x.split_at_mut(x.len() / 2);
    for (a, b) in left.iter_mut().zip(&mut *right) {
        (*a, *b) = (f64::from(*a as f32 + *b as f32), f64::from(*a as f32 - *b as f32));
    }
    rotate(left);
    rotate(right);
}

impl<E> Cache<E> {
    /// The layer's part of each page, to write.
    fn pages(&mut self) -> KvPagesMut<'_, E> {
        fn part<T>(all: &mut [T]) -> RowsMut<'_, T> {
            let width = all.len() / PAGES;
            // SAFETY: the rows lie in the slice, which is borrowed mutably, and are as far apart as they are wide.
            unsafe {
                let start = all.as_mut_ptr().add(BETWEEN);
                RowsMut::from_raw(start, PAGES, width - BETWEEN, width)
            }
        }
        match self {
            Self::Numbers(all) => KvPagesMut::Numbers(part(all)),
            Self::Codes(all) => KvPagesMut::Codes(part(all)),
        }
    }
}

impl<E: KvElement> common::Layer<E> for Layer<E> {
    const OF_F32: f64 = 1e-4;
    const OF_BF16: f64 = 2e-2;

    fn widths(&self) -> [usize; 2] {
        let (heads, kv_heads) = (self.attention.heads(), self.attention.kv_heads());
        [heads + 2 * kv_heads, heads].map(|heads| heads * self.attention.head_dim())
    }

    fn step(
        &mut self,
        form: Form,
        team: &Team,
        sequences: &[Vec<E>],
        step: &[Chunk],
        _: &[Guesses],
    ) -> Vec<E> {
        let (attention, size) = (&self.attention, self.block_size);
        let [inputs, width] = common::Layer::<E>::widths(self);
        let (mut x, mut slots) = (Vec::new(), Vec::new());
        for &(sequence, from, to) in step {
            x.extend_from_slice(&sequences[sequence][from * inputs..to * inputs]);
            slots.extend((from..to).map(|position| {
                let page = page(PAGES, 0, sequence, position / size) as usize;
                (page * size + position % size) as i64
            }));
        }
        let plan = plan((PAGES, size), attention, self.leaves_out, step, |place, index| {
            let (sequence, from, _) = step[place];
            match index < first_page(attention, size, from) {
                true => 0,
                false => page(PAGES, 0, sequence, index),
            }
        });
        let (x, keys) = (Rows::new(&x, inputs), attention.kv_heads() * attention.head_dim());
        let mut pages = self.cache.pages();
        let (of_keys, of_values) = (width..width + keys, width + keys..inputs);
        pages.append(form, team, &plan, &slots, x.columns(of_keys), x.columns(of_values));
        let mut out = vec![E::from_f32(f32::NAN); x.rows() * width];
        attend(
            form,
            team,
            &plan,
            pages.read(),
            x.columns(0..width),
            sinks(attention).as_deref(),
            &RowsMut::new(&mut out, width),
        )
        .expect("memory");
        out
    }

    /// Softmax attention of three tokens over the whole sequence.
    fn reference(&self, x: &[E]) -> Vec<(usize, f64)> {
        let [inputs, width] = common::Layer::<E>::widths(self);
        let tokens = x.len() / inputs;
        let numbers = |row: &[E]| row.iter().map(|x| f64::from(x.to_f32())).collect();
        let rows: Vec<_> = x.chunks_exact(inputs).map(|row| self.rounded(numbers(row))).collect();
        let mut out = Vec::new();
        for position in [0, tokens / 2, tokens - 1] {
            for head in 0..self.attention.heads() {
                let first = position * width + head * self.attention.head_dim();
                out.extend((first..).zip(attended(&self.attention, &rows, position, head)));
            }
        }
        out
    }
}

/// The heads' sinks, of most numbers of heads.
fn sinks(attention: &Attention) -> Option<Vec<f32>> {
    let has_sinks = attention.heads() != 3;
    has_sinks.then(|| noise::<f32>(7, attention.heads()).iter().map(|sink| 4.0 * sink).collect())
}

/// What one head of a token reads.
fn attended(attention: &Attention, x: &[Vec<f64>], position: usize, head: usize) -> Vec<f64> {
    let (dims, heads, kv_heads) = (attention.head_dim(), attention.heads(), attention.kv_heads());
    let key_head = heads + head / (heads / kv_heads);
    let at = |row: usize, head: usize, d: usize| x[row][head * dims + d];
    let left = attention.window_left;
    let first = left.map_or(0, |left| position.saturating_sub(left));
    let score = |key: usize| {
        let products = (0..dims).map(|d| at(position, head, d) * at(key, key_head, d));
        let scaled = products.sum::<f64>() * f64::from(attention.scale);
        let softcap = attention.softcap.map(f64::from);
        softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh())
    };
    let weights: Vec<f64> = (first..=position).map(|key| score(key).exp()).collect();
    let sink = sinks(attention).map_or(0.0, |sinks| f64::from(sinks[head]).exp());
    let total: f64 = weights.iter().sum::<f64>() + sink;
    let sum = |d: usize| -> f64 {
        let weighted = weights.iter().zip(first..);
        weighted.map(|(w, key)| w * at(key, key_head + kv_heads, d)).sum()
    };
    (0..dims).map(|d| sum(d) / total).collect()
}

fn attentions() -> impl Strategy<Value = Attention> {
    let heads = prop_oneof![Just((1, 1)), Just((3, 1)), Just((4, 2)), Just((6, 3)), Just((8, 1))];
    let head_dim = prop::sample::select(vec![16, 32, 48, 64, 80, 96, 128, 256]);
    let window = prop::option::of(0_usize..150);
    let softcap = prop::option::of(1.0_f32..50.0);
    (heads, head_dim, window, softcap).prop_map(
        |((heads, kv_heads), dims, window_left, softcap)| {
            let scale = 2.0 / (dims as f32).sqrt();
            let attention = Attention::new(heads, kv_heads, dims, scale);
            let mut attention = attention.expect("a shape that fits");
            (attention.window_left, attention.softcap) = (window_left, softcap);
            attention
        },
    )
}

fn forms() -> impl Strategy<Value = Form> {
    prop::sample::select(Form::available())
}

/// Lengths of up to three sequences, and how they are cut into chunks.
fn schedules() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    (prop::collection::vec(1_usize..230, 1..4), prop::collection::vec(1_usize..90, 1..12))
}

fn check<E: KvElement + PartialEq>(
    attention: Attention,
    (form, threads): (Form, usize),
    kept: (Kept, usize),
    leaves_out: bool,
    (lengths, chunks): &(Vec<usize>, Vec<usize>),
) {
    let mut chunks = chunks.iter().cycle();
    let alone = || Layer::<E>::new(attention, kept, false);
    let mut many = Layer::new(attention, kept, leaves_out);
    common::check((form, threads), lengths, alone, &mut many, |done, length| {
        (done, length.min(done + chunks.next().expect("a cycle")), [0, 0])
    });
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn near_the_reference_and_the_same_bits_in_every_schedule(
        attention in attentions(),
        form in forms(),
        block_size in prop::sample::select(vec![1, 7, 16, 64]),
        threads in 1_usize..=2,
        leaves_out in any::<bool>(),
        schedule in schedules(),
    ) {
        // A page of one token leaves room for few of them.
        let block_size = if schedule.0.iter().any(|&length| length > 85) { 16 } else { block_size };
        let kept = (Kept::Numbers, block_size);
        check::<f32>(attention, (form, threads), kept, leaves_out, &schedule);
        check::<Bf16>(attention, (form, threads), kept, leaves_out, &schedule);
    }

    #[test]
    fn codes_are_near_the_reference_and_the_same_bits_in_every_schedule(
        attention in attentions(),
        form in forms(),
        block_size in prop::sample::select(vec![16, 32, 64]),
        threads in 1_usize..=2,
        leaves_out in any::<bool>(),
        schedule in schedules(),
    ) {
        let kept = (Kept::Codes, block_size);
        check::<f32>(attention, (form, threads), kept, leaves_out, &schedule);
        check::<Bf16>(attention, (form, threads), kept, leaves_out, &schedule);
    }
}

#[test]
fn a_token_that_sees_only_itself_returns_its_value() {
    let team = Team::new(1).expect("threads");
    for form in Form::available() {
        // Heads that have no sinks.
        let attention = Attention::new(3, 1, 64, 0.125).expect("a shape that fits");
        let x = noise::<f32>(1, 5 * 64);
        let mut layer = Layer::new(attention, (Kept::Numbers, 16), false);
        let out = layer.step(form, &team, std::slice::from_ref(&x), &[(0, 0, 1)], &[]);
        assert!(out.chunks_exact(64).all(|head| head == &x[4 * 64..]));
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    assert!(Attention::new(4, 3, 64, 1.0).is_err());
    assert!(Attention::new(0, 1, 64, 1.0).is_err());
    assert!(Attention::new(4, 2, 72, 1.0).is_err());
    assert!(Attention::new(1 << 60, 1, 64, 1.0).is_err());
}
