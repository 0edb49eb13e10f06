//! Layers of blocks against dense layers of the numbers that the blocks stand for: the same bits, in
//! every form, for one row and for many.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};

use prefixcache_cpu::{Bf16, Element, Form, MappedWords, Rows, Team, WeightMemory};
use prefixcache_ops::quant::blocks::Block;
use prefixcache_ops::{Activations, BlocksError, Format, PackedLinear};
use proptest::prelude::*;

use crate::cases::cases;
use crate::noise::noise;
use crate::{forward, read};

/// Where the float16 numbers of a block are.
pub fn halves(format: Format) -> &'static [usize] {
    match format {
        Format::Q6K => &[208],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::IQ4NL | Format::IQ4XS => &[0],
        Format::MXFP4 => &[],
        _ => &[0, 2],
    }
}

/// Random rows of blocks. One scale in four is an extreme: zeros of both signs, the smallest and the
/// largest numbers.
fn random_rows(seed: u64, format: Format, inputs: usize, rows: usize) -> Vec<u8> {
    let count = rows * format.row_bytes(inputs);
    let random = noise::<f32>(seed, 3 * count);
    let byte = |i: usize| ((random[i] + 1.0) * 127.99) as u8;
    let mut bytes: Vec<u8> = (0..count).map(byte).collect();
    for (i, block) in bytes.chunks_exact_mut(format.bytes()).enumerate() {
        if format == Format::MXFP4 {
            // Sums of 252 may be no numbers.
            let choice = byte(count + 3 * i) as usize;
            let exponents = [0, 1, 2, 252].into_iter().chain(100..126);
            block[0] = exponents.cycle().nth(choice).expect("endless");
        }
        for &at in halves(format) {
            let choice = byte(count + 3 * i + at % 3) as usize;
            let extremes = [0x0000, 0x8000, 0x0001, 0x8001, 0x7bff, 0xfbff, 0x0400, 0x3c00];
            // Up to 2^-3 otherwise, so that sums stay numbers.
            let bits = u16::from(byte(2 * count + i)) << 8 & 0xaf00 | choice as u16;
            let bits = if choice.is_multiple_of(4) { extremes[choice / 4 % 8] } else { bits };
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    bytes
}

/// The numbers of rows of blocks, rounded once.
fn numbers<E: Element>(format: Format, bytes: &[u8]) -> Vec<E> {
    let blocks = bytes.chunks_exact(format.bytes());
    let numbers = blocks.flat_map(|bytes| {
        let block = Block::read(format, bytes);
        (0..format.block()).map(move |i| E::from_f32(block.number(i)))
    });
    numbers.collect()
}

fn bits<E: Element>(numbers: &[E]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_f32().to_bits()).collect()
}

/// Layers of the same weight: one kept as blocks, part by part, and one of dense numbers.
struct Pair<E> {
    form: Form,
    kept: PackedLinear<E>,
    dense: PackedLinear<E>,
    numbers: Vec<E>,
}

impl<E: Element> Pair<E> {
    /// Parts of these numbers of outputs, laid out for a form; `None` is dense.
    fn new(form: Form, inputs: usize, parts: &[(Option<Format>, usize)], with_bias: bool) -> Self {
        Self::of(form, inputs, parts, with_bias, Activations::Exact)
    }

    fn of(
        form: Form,
        inputs: usize,
        parts: &[(Option<Format>, usize)],
        with_bias: bool,
        activations: Activations,
    ) -> Self {
        let (memory, team) = (WeightMemory::default(), Team::new(2).expect("threads"));
        let sizes: Vec<usize> = parts.iter().map(|part| part.1).collect();
        let outputs = sizes.iter().sum();
        let new = |parts: &[usize]| PackedLinear::new(inputs, parts, with_bias).expect("memory");
        let (kept, mut dense) = (new(&sizes), new(&[outputs]));
        let mut kept = kept.with_activations(activations);
        let (mut all, mut first) = (Vec::new(), 0);
        for (seed, &(format, count)) in (1..).zip(parts) {
            let part = match format {
                None => noise(seed, count * inputs),
                Some(format) => {
                    let bytes = random_rows(seed, format, inputs, count);
                    let blocks = Rows::new(&bytes, format.row_bytes(inputs));
                    kept.copy_blocks(&memory, form, &team, first, format, blocks).expect("a part");
                    numbers(format, &bytes)
                }
            };
            if format.is_none() {
                kept.copy_rows(&memory, first, Rows::new(&part, inputs)).expect("memory");
            }
            first += count;
            all.extend(part);
        }
        dense.copy_rows(&memory, 0, Rows::new(&all, inputs)).expect("memory");
        if with_bias {
            let bias = noise(7, outputs);
            kept.copy_bias(0, &bias);
            dense.copy_bias(0, &bias);
        }
        Self { form, kept, dense, numbers: all }
    }

    /// Both compute the same bits of `O` numbers.
    fn check<O: Element>(&self, threads: usize, rows: usize, with_residual: bool) {
        let (inputs, outputs) = (self.kept.inputs(), self.kept.outputs());
        let team = Team::new(threads).expect("threads");
        let x = noise::<E>(8, rows * inputs);
        let residual = noise::<O>(9, rows * outputs);
        let residual = with_residual.then_some(&residual[..]);
        let [kept, dense] = [&self.kept, &self.dense]
            .map(|layer| bits(&forward(layer, self.form, &team, &x, residual)));
        let differs =
            (0..kept.len()).find(|&i| kept[i] != dense[i] && !both_nan(kept[i], dense[i]));
        assert_eq!(differs, None, "{:?}, {rows} rows of {inputs} to {outputs}", self.form);
    }
}

/// Largest scales make infinities, which cancel to NaN; its bits are nobody's promise.
fn both_nan(a: u32, b: u32) -> bool {
    f32::from_bits(a).is_nan() && f32::from_bits(b).is_nan()
}

fn format() -> impl Strategy<Value = Option<Format>> {
    prop::option::weighted(0.9, prop::sample::select(Format::ALL.to_vec()))
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn blocks_compute_what_their_numbers_do(
        form in prop::sample::select(Form::available()),
        threads in 1_usize..=2,
        rows in prop_oneof![4 => 1_usize..=14, 1 => 15_usize..220],
        groups in 1_usize..=20,
        parts in prop::collection::vec((format(), 1_usize..150), 1..=3),
        (with_bias, with_residual) in any::<(bool, bool)>(),
    ) {
        let block = parts.iter().filter_map(|part| part.0).map(Format::block).max();
        let inputs = match block {
            Some(256) => 256 * groups.div_ceil(7),
            _ => 32 * groups,
        };
        let pair = Pair::<Bf16>::new(form, inputs, &parts, with_bias);
        pair.check::<Bf16>(threads, rows, with_residual);
        pair.check::<f32>(threads, rows, with_residual);
        Pair::<f32>::new(form, inputs, &parts, with_bias).check::<f32>(threads, rows, with_residual);
    }
}

#[test]
fn every_format_in_every_form_at_the_row_counts_where_kernels_change() {
    for format in Format::ALL {
        let parts = [(Some(format), 72)];
        for form in Form::available() {
            let narrow = Pair::<Bf16>::new(form, 512, &parts, true);
            let wide = Pair::<f32>::new(form, 512, &parts, true);
            for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 200] {
                narrow.check::<Bf16>(1, rows, true);
                wide.check::<f32>(1, rows, false);
            }
        }
    }
}

#[test]
fn blocks_are_dequantized_a_part_of_the_depth_at_a_time() {
    let parts = [(Some(Format::Q4K), 72), (None, 70), (Some(Format::Q6K), 72)];
    for form in Form::available() {
        let pair = Pair::<Bf16>::new(form, 4352, &parts, true);
        // Rows of one task and of two.
        pair.check::<Bf16>(2, 9, true);
        pair.check::<Bf16>(1, 25, true);
    }
}

/// Every block's numbers, read back as rows: the signs of zeros too, which sums do not show.
fn check_rows<E: Element>(form: Form, format: Format) {
    let (inputs, outputs) = (512, 130);
    let pair =
        Pair::<E>::new(form, inputs, &[(Some(format), 70), (None, 3), (Some(format), 57)], false);
    let ids: Vec<usize> = (0..outputs).rev().chain([5, 5]).collect();
    let out = read(&pair.kept, &Team::new(2).expect("threads"), &ids);
    for (id, row) in ids.into_iter().zip(out.chunks_exact(inputs)) {
        assert_eq!(bits(row), bits(&pair.numbers[id * inputs..][..inputs]), "{format}: row {id}");
    }
}

#[test]
fn rows_are_read_as_they_were_written() {
    for format in Format::ALL {
        for form in Form::available() {
            check_rows::<Bf16>(form, format);
            check_rows::<f32>(form, format);
        }
    }
}

#[test]
fn blocks_take_the_memory_of_their_file() {
    for format in Format::ALL {
        for form in Form::available() {
            let pair = Pair::<Bf16>::new(form, 512, &[(Some(format), 128)], false);
            let file = 128 * format.row_bytes(512);
            // The factors of Q3_K take a byte each, not six bits.
            assert!(pair.kept.num_bytes() * 100 <= file * 104, "{format}");
            assert_eq!(pair.dense.num_bytes(), 2 * 128 * 512);
        }
    }
}

#[test]
fn a_part_changes_what_it_is_kept_as() {
    let (memory, team) = (WeightMemory::default(), Team::new(1).expect("threads"));
    let pair = Pair::<Bf16>::new(
        Form::detect(),
        256,
        &[(Some(Format::Q4K), 40), (Some(Format::Q6K), 30)],
        false,
    );
    let Pair { mut kept, numbers, .. } = pair;
    let rows = noise::<Bf16>(3, 5 * 256);
    kept.copy_rows(&memory, 38, Rows::new(&rows, 256)).expect("memory");
    assert_eq!(kept.formats().collect::<Vec<_>>(), [None, None]);
    let wanted = [&numbers[..38 * 256], &rows, &numbers[43 * 256..]].concat();
    let ids: Vec<usize> = (0..70).collect();
    assert_eq!(read(&kept, &team, &ids), wanted);
    let bytes = random_rows(1, Format::Q5_1, 256, 30);
    let blocks = Rows::new(&bytes, Format::Q5_1.row_bytes(256));
    kept.copy_blocks(&memory, Form::detect(), &team, 40, Format::Q5_1, blocks).expect("a part");
    assert_eq!(kept.formats().collect::<Vec<_>>(), [None, Some(Format::Q5_1)]);
    let wanted = [&wanted[..40 * 256], &self::numbers(Format::Q5_1, &bytes)].concat();
    assert_eq!(read(&kept, &team, &ids), wanted);
}

/// The parts of a layer in a file that has no name any more, and a layer that has mapped them.
fn mapped<E: Element>(
    form: Form,
    activations: Activations,
    layer: &PackedLinear<E>,
    sizes: &[usize],
) -> PackedLinear<E> {
    let path = std::env::temp_dir().join(format!("laid-out-{}-{form:?}", std::process::id()));
    let mut file = File::create_new(&path).expect("a new file");
    let mut places = Vec::new();
    for part in 0..sizes.len() {
        let bytes = layer.laid_out(part).expect("a part that was written");
        let start = file.seek(SeekFrom::End(0)).expect("a file") as usize;
        file.write_all(bytes).expect("room");
        file.set_len((start + bytes.len()).next_multiple_of(64) as u64).expect("room");
        places.push((start, bytes.len()));
    }
    let file = File::open(&path).expect("a file");
    std::fs::remove_file(&path).expect("a file");
    // SAFETY: nobody has its name to write to it.
    let words = unsafe { MappedWords::map(&file).expect("a map") };
    let new = PackedLinear::new(layer.inputs(), sizes, false).expect("memory");
    let mut new = new.with_activations(activations);
    for (part, (format, (start, bytes))) in layer.formats().zip(places).enumerate() {
        let other = words.part(start, bytes - 64).expect("words");
        let refused = new.map_laid_out(form, part, format, &other);
        assert_eq!(refused, Err(BlocksError::Size));
        let words = words.part(start, bytes).expect("words");
        new.map_laid_out(form, part, format, &words).expect("the part's words");
    }
    assert!(words.part(0, 1 << 40).is_none() && words.part(4, 64).is_none());
    new
}

#[test]
fn mapped_parts_are_what_was_written_until_they_are_written_again() {
    let (memory, team) = (WeightMemory::default(), Team::new(2).expect("threads"));
    let parts = [(None, 40), (Some(Format::Q4K), 70), (Some(Format::Q6K), 30)];
    for (form, activations) in Form::available()
        .into_iter()
        .flat_map(|form| [Activations::Exact, Activations::Int8].map(|one| (form, one)))
    {
        let Pair { mut kept, .. } = Pair::<f32>::of(form, 256, &parts, false, activations);
        let mut layer = mapped(form, activations, &kept, &[40, 70, 30]);
        let x = noise::<f32>(3, 5 * 256);
        let outputs = |layer: &PackedLinear<f32>| {
            let ids: Vec<usize> = (0..140).collect();
            let out = forward(layer, form, &team, &x, None);
            bits(&[out, read(layer, &team, &ids)].concat())
        };
        let (before, other) = (outputs(&kept), mapped(form, activations, &kept, &[40, 70, 30]));
        assert_eq!(outputs(&layer), before);
        let (rows, bytes) = (noise(5, 3 * 256), random_rows(9, Format::Q6K, 256, 30));
        for to in [&mut layer, &mut kept] {
            let rows = Rows::new(&rows, 256);
            to.copy_rows(&memory, 39, rows).expect("memory");
            let blocks = rows_of(Format::Q6K, &bytes);
            to.copy_blocks(&memory, form, &team, 110, Format::Q6K, blocks).expect("a part");
        }
        assert_eq!(outputs(&layer), outputs(&kept));
        assert_eq!(outputs(&other), before);
        assert_ne!(outputs(&layer), before);
    }
}

fn rows_of(format: Format, bytes: &[u8]) -> Rows<'_, u8> {
    Rows::new(bytes, format.row_bytes(256))
}

#[test]
fn what_is_no_weight_is_refused_and_nothing_written() {
    let (memory, team) = (WeightMemory::default(), Team::new(2).expect("threads"));
    for format in Format::ALL {
        let mut layer = PackedLinear::<f32>::new(256, &[20, 30], false).expect("memory");
        let good = random_rows(1, format, 256, 30);
        layer
            .copy_blocks(&memory, Form::detect(), &team, 20, format, rows_of(format, &good))
            .expect("a part");
        let before = layer.num_bytes();
        let no_numbers = [0x7c00_u16, 0xfc00, 0x7e01].map(u16::to_le_bytes);
        let of_halves = halves(format).iter();
        let mut bad_bytes: Vec<(usize, Vec<u8>)> =
            of_halves.flat_map(|&at| no_numbers.map(|bits| (at, bits.to_vec()))).collect();
        if format == Format::MXFP4 {
            bad_bytes.extend([253, 254, 255].map(|exponent| (0, vec![exponent])));
        }
        assert!(!bad_bytes.is_empty(), "{format}");
        for (at, bits) in bad_bytes {
            let mut bad = random_rows(2, format, 256, 30);
            let block = 17 * format.row_bytes(256) + format.row_bytes(256) - format.bytes();
            bad[block + at..][..bits.len()].copy_from_slice(&bits);
            let (form, bad) = (Form::detect(), rows_of(format, &bad));
            let refused = layer.copy_blocks(&memory, form, &team, 20, format, bad);
            assert_eq!(refused, Err(BlocksError::Scale(17)), "{format}");
        }
        for (first, count) in [(0, 30), (20, 20), (21, 29), (0, 50), (50, 0)] {
            assert_eq!(layer.check_blocks(first, count, format), Err(BlocksError::NoPart));
        }
        let ids: Vec<usize> = (20..50).collect();
        assert_eq!(bits(&read(&layer, &team, &ids)), bits(&numbers::<f32>(format, &good)));
        assert_eq!(layer.num_bytes(), before);
        let odd = PackedLinear::<f32>::new(format.block() + 16, &[4], false).expect("memory");
        assert_eq!(odd.check_blocks(0, 4, format), Err(BlocksError::Inputs(format)));
    }
}

#[test]
fn outputs_that_were_never_written_are_bias_and_residual() {
    let (memory, team) = (WeightMemory::default(), Team::new(1).expect("threads"));
    let mut layer = PackedLinear::<f32>::new(32, &[3, 2], true).expect("memory");
    layer.copy_rows(&memory, 3, Rows::new(&[1.0; 64], 32)).expect("memory");
    layer.copy_bias(0, &[1.0; 5]);
    for form in Form::available() {
        let out = forward(&layer, form, &team, &[1.0; 64], Some(&[0.5_f32; 10]));
        assert_eq!(out, [1.5, 1.5, 1.5, 33.5, 33.5, 1.5, 1.5, 1.5, 33.5, 33.5]);
    }
}
