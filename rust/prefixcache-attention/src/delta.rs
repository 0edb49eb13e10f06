//! The gated delta rule and Mamba-2's recurrence, each with the short convolution before it and the gate after
//! it, from and to states that lie in the paged cache.
//!
//! A layer has `key_heads` heads of queries and keys, each shared by `value_heads / key_heads` heads of values. A
//! value head keeps a matrix S of [`key_dim`, `value_dim`] numbers. A token's queries, keys and values pass a
//! convolution over the last tokens and SiLU, queries and keys are made of length 1, and for each value head
//!
//! ```text
//! S = S * e^-(A * ln(1 + e^(a + time_bias)))     decay, with a of the token
//! S = S + k (v - k S) / (1 + e^-b)               the delta rule, with b of the token
//! out = norm(q S / sqrt(key_dim)) * silu(z)      with z of the token
//! ```
//!
//! Mamba-2 does not correct what is known of a key, and has another gate. Its C are the queries, its B the keys, its
//! x the values, all as they leave the convolution, and t = ln(1 + e^(a + time_bias)):
//!
//! ```text
//! S = S * e^-(A * t) + k v * t
//! out = (q S + skip * v) * silu(z)               a norm of several heads follows
//! ```
//!
//! **The cache.** A block of a sequence keeps the state after the last token that was computed in it, in `f32`: the
//! matrices, and what the convolution needs of the tokens before. The state before a step is that of the block of
//! the token before; at each block's end, and at the step's, the state is written to the token's block, if it has
//! one. So a full block is never written again, and a sequence that hits it goes on from there. What is kept of a key head is one
//! run of numbers, and a layer's runs lie in the parts of one page of each of several groups, one after the other,
//! cut anywhere.
//!
//! **Bits.** Tokens are computed one by one in one order, in `f32`; states are kept as they are. A row is the same
//! whatever is computed with it. Columns of S stand in strips, which are computed alone.
//!
//! **Guesses.** The last rows of a sequence may be guesses at its next tokens. They are computed, but their states
//! are not written. Once it is known how many of them were right, [`replay_delta_rule`] takes the inputs of these
//! through the states in the blocks, token by token in the same order, and so to the same bits.

use std::array::from_fn;
use std::ops::Range;

use prefixcache_cpu::memory::filled;
use prefixcache_cpu::{Element, Form, Kernel, Lanes, OutOfMemory, Rows, RowsMut, Team, math};

use crate::Plan;
use crate::conv::MAX_TAPS;
use crate::plan::{NO_PAGE, Run};

/// Sizes of heads are multiples of this, so that they are whole vectors in any form.
pub const HEAD_STEP: usize = 16;

/// Columns of a matrix that are computed together.
const STRIP: usize = 32;

/// Tokens that pass a head together: what they share stays in the processor's cache.
const SPAN: usize = 16;

/// Added to the sum of squares of a query or key.
const LENGTH_EPS: f32 = 1e-6;

/// The heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Of queries and of keys.
    pub key_heads: usize,
    /// Of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Numbers of a query and of a key: a multiple of [`HEAD_STEP`].
    pub key_dim: usize,
    /// Numbers of a value: a multiple of [`HEAD_STEP`].
    pub value_dim: usize,
    /// Tokens that the convolution is over: from 1 to [`MAX_TAPS`].
    pub taps: usize,
    /// Value heads of a key head are `key_heads` apart, and not neighbours: what GGUF files have.
    pub tiled: bool,
    /// Key heads in a row that have the same queries and keys: so their value heads are computed apart, and each
    /// keeps what the convolution needs of both.
    pub alike: usize,
    /// Whether a value is corrected by what is known of its key, which queries and keys of length 1 are for: the
    /// delta rule. Mamba-2 does not.
    pub corrects: bool,
}

impl DeltaHeads {
    /// Whether the kernel can compute them, and their sizes can be counted.
    pub fn are_sound(&self) -> bool {
        let sizes = [self.key_heads, self.value_heads, self.key_dim, self.value_dim];
        let dims = [self.key_dim, self.value_dim];
        sizes.iter().all(|size| (1..=1 << 14).contains(size))
            && self.value_heads.is_multiple_of(self.key_heads)
            && dims.iter().all(|dim| dim.is_multiple_of(HEAD_STEP))
            && (self.alike > 0 && self.key_heads.is_multiple_of(self.alike))
            && (1..=MAX_TAPS).contains(&self.taps)
    }

    /// Numbers of a token that pass the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Numbers of a token's queries, and of its keys.
    fn keys(&self) -> usize {
        self.key_heads / self.alike * self.key_dim
    }

    /// Numbers of a token's values.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Numbers of a token's row: queries, keys, values, z, b where values are corrected, and a.
    pub fn inputs(&self) -> usize {
        self.channels() + self.values() + (1 + usize::from(self.corrects)) * self.value_heads
    }

    /// Numbers of a layer's state.
    pub fn state(&self) -> usize {
        self.key_heads * self.kept()
    }

    /// Value heads of a key head.
    fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Numbers of a value head's matrix.
    fn matrix(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Numbers of a key head that pass the convolution.
    fn width(&self) -> usize {
        2 * self.key_dim + self.group() * self.value_dim
    }

    /// Numbers that are kept of a key head.
    fn kept(&self) -> usize {
        self.group() * self.matrix() + (self.taps - 1) * self.width()
    }

    /// The number of a key head's value head.
    fn value_head(&self, head: usize, number: usize) -> usize {
        if self.tiled { head + number * self.key_heads } else { head * self.group() + number }
    }

    /// Where queries, keys and values of a key head stand in a token's row.
    fn columns(&self, head: usize) -> impl Iterator<Item = Range<usize>> {
        let (heads, keys) = (*self, self.keys());
        let first_key = head / self.alike * self.key_dim;
        let of_keys = [0, keys].map(|first| (first + first_key, self.key_dim));
        let of_values = (0..self.group()).map(move |number| {
            let value_head = heads.value_head(head, number);
            (2 * keys + value_head * heads.value_dim, heads.value_dim)
        });
        let all = of_keys.into_iter().chain(of_values);
        all.map(|(first, size)| first..first + size)
    }
}

/// The weights of a layer.
#[derive(Clone, Copy)]
pub struct DeltaRule<'a> {
    /// The heads.
    pub heads: DeltaHeads,
    /// [taps, channels] of the convolution, the oldest token's first.
    pub conv: Rows<'a, f32>,
    /// Of each channel, where there is one.
    pub conv_bias: Option<&'a [f32]>,
    /// A of each value head, above 0.
    pub decay: &'a [f32],
    /// What is added to a, of each value head.
    pub time_bias: &'a [f32],
    /// `value_dim`: the weight of the norm, where values are corrected.
    pub norm: &'a [f32],
    /// What multiplies the values that go past the matrix, of each value head, where values are not corrected.
    pub skip: &'a [f32],
    /// Added to the norm's mean square.
    pub eps: f32,
}

/// A part of a layer's state.
pub struct StatePart<'a> {
    /// Where the pages of its group are.
    pub plan: &'a Plan,
    /// A row for each page: the numbers that lie there, with those of the parts before in front of them.
    pub pages: RowsMut<'a, f32>,
}

/// Writes each token's output to `out` [T, values], and the states to the parts: those after all rows of a
/// sequence but its last `guesses`, \[S\], or none where that is empty.
///
/// `x` is [T, inputs]. The plans of all parts have the same sequences, see at least the token before, and write
/// pages of one sequence each ([`Plan::writes_apart`]).
///
/// # Errors
/// There is no memory for a head's matrices; some rows of `out` and some states are not written then.
///
/// # Panics
/// The shapes do not fit each other or the plans.
pub fn delta_rule<E: Element, O: Element>(
    form: Form,
    team: &Team,
    rule: &DeltaRule<'_>,
    parts: &[StatePart<'_>],
    guesses: &[usize],
    x: Rows<'_, E>,
    out: &RowsMut<'_, O>,
) -> Result<(), OutOfMemory> {
    let plan = check(rule, parts);
    let rows = plan.num_queries();
    assert_eq!(x.shape(), (rows, rule.heads.inputs()), "shape of x");
    assert_eq!(out.shape(), (rows, rule.heads.values()), "shape of out");
    let runs = plan.runs(guesses);
    each_head(form, team, (rule, parts), &runs, x, Some(out))
}

/// Writes the states after the first `accepted` \[S\] of the `guesses` \[S\] of each sequence to the parts. `x` are the
/// rows of all guesses in [`delta_rule`], which has computed the step of these plans.
///
/// # Errors
/// There is no memory for a head's matrices; some states are not written then.
///
/// # Panics
/// As [`delta_rule`], or more guesses are accepted than there are.
pub fn replay_delta_rule<E: Element>(
    form: Form,
    team: &Team,
    rule: &DeltaRule<'_>,
    parts: &[StatePart<'_>],
    (guesses, accepted): (&[usize], &[usize]),
    x: Rows<'_, E>,
) -> Result<(), OutOfMemory> {
    let plan = check(rule, parts);
    let count = guesses.iter().sum();
    assert_eq!(x.shape(), (count, rule.heads.inputs()), "shape of x");
    let runs = plan.accepted_runs(guesses, accepted);
    each_head(form, team, (rule, parts), &runs, x, None::<&RowsMut<'_, E>>)
}

/// The plan of the parts, which fit each other and the rule.
fn check<'a>(rule: &DeltaRule<'_>, parts: &[StatePart<'a>]) -> &'a Plan {
    let heads = rule.heads;
    assert!(heads.are_sound(), "heads");
    let numbers: usize = parts.iter().map(|part| part.pages.width()).sum();
    assert_eq!(numbers, heads.state(), "numbers of the parts");
    let plan = parts[0].plan;
    for StatePart { plan: other, pages } in parts {
        assert!(plan.has_sequences_of(other), "sequences of the plans");
        assert!(other.writes_apart(), "pages that are written");
        assert!(pages.rows() >= other.num_pages(), "rows of the cache");
        let seen = other.attention().window_left.unwrap_or(usize::MAX);
        assert!(seen >= 1, "window of the plan");
    }
    assert_eq!(rule.conv.shape(), (heads.taps, heads.channels()), "conv");
    assert_eq!(rule.decay.len(), heads.value_heads, "decay");
    assert_eq!(rule.time_bias.len(), heads.value_heads, "time_bias");
    if let Some(bias) = rule.conv_bias {
        assert_eq!(bias.len(), heads.channels(), "bias of conv");
    }
    if heads.corrects {
        assert_eq!(rule.norm.len(), heads.value_dim, "norm");
    } else {
        assert_eq!(rule.skip.len(), heads.value_heads, "skip");
    }
    plan
}

fn each_head<E: Element, O: Element>(
    form: Form,
    team: &Team,
    (rule, parts): (&DeltaRule<'_>, &[StatePart<'_>]),
    runs: &[Run],
    x: Rows<'_, E>,
    out: Option<&RowsMut<'_, O>>,
) -> Result<(), OutOfMemory> {
    let heads = rule.heads.key_heads;
    team.try_run(runs.len() * heads, |task| {
        form.run(HeadRun { rule, parts, x, out, run: &runs[task / heads], head: task % heads })
    })
}

/// A key head of one sequence, with its value heads: all tokens of a run.
struct HeadRun<'a, E, O> {
    rule: &'a DeltaRule<'a>,
    parts: &'a [StatePart<'a>],
    x: Rows<'a, E>,
    /// Where outputs go, if they are wanted.
    out: Option<&'a RowsMut<'a, O>>,
    run: &'a Run,
    head: usize,
}

/// A vector of channels.
struct Channel {
    /// The span's first row.
    first: usize,
    /// The column in a row.
    at: usize,
    /// The place among those of the head.
    place: usize,
}

/// Room for a head's state and for what a span of its tokens has.
struct Room {
    /// As it is kept: a matrix for each value head, then the inputs of the last tokens.
    state: Vec<f32>,
    /// [`SPAN`, width]: queries, keys and values after the convolution.
    qkv: Vec<f32>,
    /// [`SPAN`]: what multiplies the matrix.
    decay: [f32; SPAN],
    /// [`SPAN`]: what multiplies the change of a value.
    rate: [f32; SPAN],
    /// [`SPAN`, `value_dim`]
    read: Vec<f32>,
}

impl<E: Element, O: Element> Kernel for HeadRun<'_, E, O> {
    type Output = Result<(), OutOfMemory>;

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Self::Output {
        let (heads, size) = (self.rule.heads, self.parts[0].plan.block_size());
        let Run { rows, start, kept, .. } = self.run;
        if rows.is_empty() {
            return Ok(());
        }
        let mut room = Room {
            state: filled(0.0, 1, heads.kept())?,
            qkv: filled(0.0, SPAN, heads.width())?,
            decay: [0.0; SPAN],
            rate: [0.0; SPAN],
            read: filled(0.0, SPAN, heads.value_dim)?,
        };
        if *start > 0 {
            self.read(start - 1, &mut room.state);
        }
        let (mut row, mut position) = (rows.start, *start);
        while row < rows.end {
            let end = if row < *kept { *kept } else { rows.end };
            let count = SPAN.min(size - position % size).min(end - row);
            self.pass(lanes, row..row + count, &mut room);
            (row, position) = (row + count, position + count);
            if row == *kept || row < *kept && position.is_multiple_of(size) {
                self.keep(position - 1, &room.state);
            }
        }
        Ok(())
    }
}

impl<E: Element, O: Element> HeadRun<'_, E, O> {
    /// The runs of the head's numbers: which of them, of which part, and where they begin there.
    fn runs(&self) -> impl Iterator<Item = (Range<usize>, &StatePart<'_>, usize)> {
        let kept = self.rule.heads.kept();
        let (begin, end) = (self.head * kept, (self.head + 1) * kept);
        let mut first = 0;
        self.parts.iter().filter_map(move |part| {
            let last = first + part.pages.width();
            let (from, to) = (begin.max(first), end.min(last));
            let at = from - first;
            first = last;
            (from < to).then(|| (from - begin..to - begin, part, at))
        })
    }

    /// Reads the state after the token at a position.
    fn read(&self, position: usize, state: &mut [f32]) {
        for (kept, StatePart { plan, pages }, at) in self.runs() {
            let (page, _) = plan.place(self.run.sequence, position);
            // SAFETY: pages that are written are of one sequence, and a head's numbers of them of one task.
            let numbers = unsafe { pages.shared_part(page, at, kept.len()) };
            state[kept].copy_from_slice(numbers);
        }
    }

    /// Writes the state after the token at a position of the step.
    fn keep(&self, position: usize, state: &[f32]) {
        for (kept, StatePart { plan, pages }, at) in self.runs() {
            let (page, _) = plan.place(self.run.sequence, position);
            if page == NO_PAGE {
                continue;
            }
            // SAFETY: as above; this task reads nothing meanwhile.
            let numbers = unsafe { pages.part(page, at, kept.len()) };
            numbers.copy_from_slice(&state[kept]);
        }
    }

    /// Takes tokens of a block through the head.
    #[inline(always)]
    fn pass<L: Lanes>(&self, lanes: L, rows: Range<usize>, room: &mut Room) {
        let heads = self.rule.heads;
        self.convolve(lanes, rows.clone(), room);
        let corrected = if heads.corrects { rows.len() } else { 0 };
        for qkv in room.qkv.chunks_exact_mut(heads.width()).take(corrected) {
            let (queries, keys) = qkv[..2 * heads.key_dim].split_at_mut(heads.key_dim);
            to_length(lanes, queries, 1.0 / (heads.key_dim as f32).sqrt());
            to_length(lanes, keys, 1.0);
        }
        for value_head in 0..heads.group() {
            self.rates(rows.clone(), value_head, room);
            let mut first = 0;
            while first < heads.value_dim {
                let columns = first..heads.value_dim.min(first + STRIP);
                match columns.len() / L::LANES {
                    4 => self.strip::<L, 4>(lanes, rows.len(), value_head, columns, room),
                    2 => self.strip::<L, 2>(lanes, rows.len(), value_head, columns, room),
                    _ => self.strip::<L, 1>(lanes, rows.len(), value_head, columns, room),
                }
                first += STRIP;
            }
            let Some(out) = self.out else { continue };
            let first = 2 * heads.key_dim + value_head * heads.value_dim;
            let values = room.qkv.chunks_exact(heads.width());
            let read = room.read.chunks_exact(heads.value_dim).zip(values);
            for (row, (read, qkv)) in rows.clone().zip(read) {
                self.write(lanes, out, row, value_head, read, &qkv[first..]);
            }
        }
    }

    /// Makes queries, keys and values of the tokens, and keeps their last inputs.
    #[inline(always)]
    fn convolve<L: Lanes>(&self, lanes: L, rows: Range<usize>, room: &mut Room) {
        let heads = self.rule.heads;
        let (taps, width) = (heads.taps, heads.width());
        let (_, before) = room.state.split_at_mut(heads.group() * heads.matrix());
        let mut place = 0;
        for columns in heads.columns(self.head) {
            for at in columns.step_by(L::LANES) {
                let channel = Channel { first: rows.start, at, place };
                for token in 0..rows.len() {
                    let mut sum = match self.rule.conv_bias {
                        // SAFETY: a whole vector begins there.
                        Some(bias) => unsafe { lanes.load(bias[at..at + L::LANES].as_ptr()) },
                        None => lanes.splat(0.0),
                    };
                    for tap in 0..taps {
                        let weight = &self.rule.conv.row(tap)[at..at + L::LANES];
                        // SAFETY: a whole vector begins there.
                        let weight = unsafe { lanes.load(weight.as_ptr()) };
                        sum = lanes.mul_add(
                            weight,
                            self.input(lanes, &channel, before, token + tap),
                            sum,
                        );
                    }
                    let to = &mut room.qkv[token * width + place..][..L::LANES];
                    // SAFETY: as above.
                    unsafe { lanes.store(to.as_mut_ptr(), silu(lanes, sum)) };
                }
                for token in 0..taps - 1 {
                    let moved = self.input(lanes, &channel, before, token + rows.len());
                    let to = &mut before[token * width + place..][..L::LANES];
                    // SAFETY: as above.
                    unsafe { lanes.store(to.as_mut_ptr(), moved) };
                }
                place += L::LANES;
            }
        }
    }

    /// A vector of the inputs, of which the first tokens are those before the span.
    #[inline(always)]
    fn input<L: Lanes>(&self, lanes: L, channel: &Channel, before: &[f32], token: usize) -> L::V {
        let heads = self.rule.heads;
        let &Channel { first, at, place } = channel;
        // SAFETY: sizes of heads are whole vectors, and so is what begins here.
        unsafe {
            if let Some(token) = token.checked_sub(heads.taps - 1) {
                let from = &self.x.row(first + token)[at..at + L::LANES];
                E::load(lanes, from.as_ptr())
            } else {
                let from = &before[token * heads.width() + place..][..L::LANES];
                lanes.load(from.as_ptr())
            }
        }
    }

    /// How much of the matrix the tokens keep, and how much of a change they make.
    #[inline(always)]
    fn rates(&self, rows: Range<usize>, value_head: usize, room: &mut Room) {
        let heads = self.rule.heads;
        let value_head = heads.value_head(self.head, value_head);
        let first = heads.channels() + heads.values();
        for (token, row) in rows.enumerate() {
            let row = &self.x.row(row)[first..];
            let last = self.x.width() - heads.value_heads - first;
            let [b, a] = [0, last].map(|at| f64::from(row[at + value_head].to_f32()));
            let time = soft_plus(a + f64::from(self.rule.time_bias[value_head]));
            let decay = -f64::from(self.rule.decay[value_head]) * time;
            room.decay[token] = math::exp(decay.clamp(-700.0, 0.0)) as f32;
            room.rate[token] = if heads.corrects {
                (1.0 / (1.0 + math::exp(-b.clamp(-700.0, 700.0)))) as f32
            } else {
                time as f32
            };
        }
    }

    /// Takes the tokens through some columns of a matrix, `N` vectors.
    #[inline(always)]
    fn strip<L: Lanes, const N: usize>(
        &self,
        lanes: L,
        tokens: usize,
        value_head: usize,
        columns: Range<usize>,
        room: &mut Room,
    ) {
        let heads = self.rule.heads;
        let (keys, width) = (heads.key_dim, heads.width());
        let first = value_head * heads.matrix() + columns.start * keys;
        let matrix = &mut room.state[first..first + keys * N * L::LANES];
        let first_value = 2 * keys + value_head * heads.value_dim + columns.start;
        for (token, qkv) in room.qkv.chunks_exact(width).take(tokens).enumerate() {
            let (decay, rate) = (lanes.splat(room.decay[token]), room.rate[token]);
            let mut change = if heads.corrects {
                products::<L, N>(lanes, matrix, &qkv[keys..2 * keys])
            } else {
                [lanes.splat(0.0); N]
            };
            for (known, value) in change.iter_mut().zip(qkv[first_value..].chunks_exact(L::LANES)) {
                // SAFETY: the chunk is a vector.
                let value = unsafe { lanes.load(value.as_ptr()) };
                let missing = lanes.sub(value, lanes.mul(decay, *known));
                *known = lanes.mul(missing, lanes.splat(rate));
            }
            let read = update::<L, N>(lanes, matrix, qkv, decay, &change);
            let to = &mut room.read[token * heads.value_dim + columns.start..];
            for (to, read) in to.chunks_exact_mut(L::LANES).zip(read) {
                // SAFETY: the chunk is a vector.
                unsafe { lanes.store(to.as_mut_ptr(), read) };
            }
        }
    }

    /// Writes what a token read, gated: normalised before, or with its `values` added.
    #[inline(always)]
    fn write<L: Lanes>(
        &self,
        lanes: L,
        out: &RowsMut<'_, O>,
        row: usize,
        value_head: usize,
        read: &[f32],
        values: &[f32],
    ) {
        let (rule, heads) = (self.rule, self.rule.heads);
        let value_head = heads.value_head(self.head, value_head);
        let first = value_head * heads.value_dim;
        let gates = &self.x.row(row)[heads.channels() + first..][..read.len()];
        // SAFETY: a value head of a row belongs to one task.
        let out = unsafe { out.part(row, first, read.len()) };
        let values = &values[..read.len()];
        let factor = if heads.corrects {
            let mean = sum_of_squares(lanes, read) / read.len() as f32;
            1.0 / (mean + rule.eps).sqrt()
        } else {
            rule.skip[value_head]
        };
        let factor = lanes.splat(factor);
        for at in (0..read.len()).step_by(L::LANES) {
            // SAFETY: they are equally long, and whole vectors.
            unsafe {
                let read = lanes.load(read[at..].as_ptr());
                let made = if heads.corrects {
                    let normed = lanes.mul(read, factor);
                    lanes.mul(normed, lanes.load(rule.norm[at..].as_ptr()))
                } else {
                    lanes.mul_add(factor, lanes.load(values[at..].as_ptr()), read)
                };
                let gate = silu(lanes, E::load(lanes, gates[at..].as_ptr()));
                O::store(lanes, out[at..].as_mut_ptr(), lanes.mul(made, gate));
            }
        }
    }
}

/// The products of a row with the columns of a strip.
#[inline(always)]
fn products<L: Lanes, const N: usize>(lanes: L, matrix: &[f32], row: &[f32]) -> [L::V; N] {
    let [mut first, mut second] = [[lanes.splat(0.0); N]; 2];
    let lines = matrix.chunks_exact(2 * N * L::LANES);
    for (lines, numbers) in lines.zip(row.chunks_exact(2)) {
        // SAFETY: there are two lines of N vectors.
        let at = |n: usize| unsafe { lanes.load(lines.as_ptr().add(n * L::LANES)) };
        let [a, b] = [lanes.splat(numbers[0]), lanes.splat(numbers[1])];
        first = from_fn(|n| lanes.mul_add(a, at(n), first[n]));
        second = from_fn(|n| lanes.mul_add(b, at(N + n), second[n]));
    }
    from_fn(|n| lanes.add(first[n], second[n]))
}

/// Changes a strip as keys say, and gives the products of the queries with it. `qk` begins with both.
#[inline(always)]
fn update<L: Lanes, const N: usize>(
    lanes: L,
    matrix: &mut [f32],
    qk: &[f32],
    decay: L::V,
    change: &[L::V; N],
) -> [L::V; N] {
    let [mut first, mut second] = [[lanes.splat(0.0); N]; 2];
    let (queries, keys) = qk.split_at(matrix.len() / (N * L::LANES));
    let pairs = keys.chunks_exact(2).zip(queries.chunks_exact(2));
    let lines = matrix.chunks_exact_mut(2 * N * L::LANES);
    for (lines, (keys, queries)) in lines.zip(pairs) {
        let start = lines.as_mut_ptr();
        let changed = |line: usize, key: L::V, n: usize| {
            // SAFETY: there are two lines of N vectors.
            unsafe {
                let place = start.add((line * N + n) * L::LANES);
                let kept = lanes.mul(decay, lanes.load(place));
                let s = lanes.mul_add(key, change[n], kept);
                lanes.store(place, s);
                s
            }
        };
        let [a, b] = [lanes.splat(keys[0]), lanes.splat(keys[1])];
        let [c, d] = [lanes.splat(queries[0]), lanes.splat(queries[1])];
        first = from_fn(|n| lanes.mul_add(c, changed(0, a, n), first[n]));
        second = from_fn(|n| lanes.mul_add(d, changed(1, b, n), second[n]));
    }
    from_fn(|n| lanes.add(first[n], second[n]))
}

/// x / (1 + e^-x)
#[inline(always)]
fn silu<L: Lanes>(lanes: L, x: L::V) -> L::V {
    lanes.times_sigmoid(x, lanes.sub(lanes.splat(0.0), x))
}

/// ln(1 + e^x)
fn soft_plus(x: f64) -> f64 {
    if x > 30.0 {
        return x;
    }
    math::ln(1.0 + math::exp(x.max(-700.0)))
}

/// Of whole vectors.
#[inline(always)]
fn sum_of_squares<L: Lanes>(lanes: L, numbers: &[f32]) -> f32 {
    let mut squares = lanes.splat(0.0);
    for vector in numbers.chunks_exact(L::LANES) {
        // SAFETY: the chunk is a vector.
        let v = unsafe { lanes.load(vector.as_ptr()) };
        squares = lanes.mul_add(v, v, squares);
    }
    lanes.sum(squares)
}

/// Gives a head the length `length`.
#[inline(always)]
fn to_length<L: Lanes>(lanes: L, numbers: &mut [f32], length: f32) {
    let scale = lanes.splat(length / (sum_of_squares(lanes, numbers) + LENGTH_EPS).sqrt());
    for vector in numbers.chunks_exact_mut(L::LANES) {
        // SAFETY: the chunk is a vector.
        unsafe { lanes.store(vector.as_mut_ptr(), lanes.mul(lanes.load(vector.as_ptr()), scale)) };
    }
}
