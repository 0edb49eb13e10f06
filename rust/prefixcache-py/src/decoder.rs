//! The Python class `DecoderStack`.

use prefixcache_attention::{KvElement, KvPagesMut, StatePart, replay_delta_rule};
use prefixcache_core::error::Argument;
use prefixcache_cpu::memory::filled;
use prefixcache_decoder::{Group, Mixer, Rotation, Scratch, Step};
use pyo3::prelude::*;

use crate::arguments::{
    List, Number, Numbers, One, OneOf, Real, Value, or, or_empty, whole_numbers,
};
use crate::attention::{PagedAttention, PlannedStep};
use crate::cpu::{Cpu, DType, Matrix, with_dtype};
use crate::delta::{StatePlace, sees_states};
use crate::errors::{Failure, Result, ensure, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::layer::{DecoderLayer, Guard};
use crate::linear::LayerElement;
use crate::names;

/// The addresses of the cosines and sines of a step's positions.
struct Angles([Number<names::Rotations>; 2]);

impl Value for Angles {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let wanted = "a pair of the addresses of cosines and sines";
        Ok(Self(whole_numbers(argument, wanted, value)?.map(One::new)))
    }
}

/// The tensors of a step.
struct Tensors {
    rotations: Vec<[Matrix; 2]>,
    x: Matrix,
    /// One a layer.
    caches: Vec<Matrix>,
    /// What layers alone have, for all of them.
    own_inputs: Option<Matrix>,
    states: States,
    /// One a layer: its inputs of the step's guesses.
    guessed: Vec<Matrix>,
}

/// Of each layer the groups and places of its state's parts.
type States = Vec<Vec<(usize, Matrix)>>;

/// The parts of a layer's state.
///
/// # Safety
/// They are numbers of float32, which nobody else uses while `'a` lasts.
unsafe fn parts_of<'a>(
    states: &[(usize, Matrix)],
    steps: &[&'a PlannedStep],
) -> Result<Vec<StatePart<'a>>> {
    let part = |&(group, pages): &(usize, Matrix)| {
        // SAFETY: the caller's promise.
        let pages = unsafe { pages.rows_mut::<f32>()? };
        let plan = &steps[group].plan;
        Ok::<_, Failure>(StatePart { plan, pages })
    };
    states.iter().map(part).collect()
}

/// What states may still have to take in of the last step.
#[derive(Default)]
struct Guessed {
    /// How many of the last tokens of each sequence were guesses.
    counts: Vec<usize>,
    /// The inputs of their rows, layer by layer.
    numbers: Vec<f32>,
}

impl Guessed {
    /// A row for each guess, of each of these widths.
    fn rows(&mut self, widths: &[usize], dtype: DType) -> Result<Vec<Matrix>> {
        let rows: usize = self.counts.iter().sum();
        let width = widths.iter().sum::<usize>() * dtype.size() / size_of::<f32>() + 1;
        if self.numbers.len() < rows.saturating_mul(width) {
            self.numbers = filled(0.0, rows, width)?;
        }
        let mut next = self.numbers.as_mut_ptr().expose_provenance();
        let matrix = |&width: &usize| {
            let address = next;
            next += rows * width * dtype.size();
            Matrix::dense(Number::<names::Guesses>::new(address), rows, width)
        };
        Ok(widths.iter().map(matrix).collect())
    }
}

/// The layers of a decoder on the CPU, one call a step.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DecoderStack {
    cpu: Py<Cpu>,
    dtype: DType,
    eps: f32,
    hidden: usize,
    layers: Vec<Py<DecoderLayer>>,
    guessed: Exclusive<Guessed>,
}

impl DecoderStack {
    /// # Safety
    /// The addresses are those of numbers of type E, and of float32 for the angles.
    unsafe fn run<E: LayerElement + KvElement>(
        &self,
        (steps, guesses): (&[&PlannedStep], &[usize]),
        groups: &[Group<'_>],
        (attentions, layer_groups): (&[&PagedAttention], &[usize]),
        linears: &[Vec<Guard<'_>>],
        tensors: &Tensors,
    ) -> Result<()> {
        let rotation = |[cos, sin]: &[Matrix; 2]| {
            // SAFETY: the caller's promise.
            let (cos, sin) = unsafe { (cos.rows()?, sin.rows()?) };
            Ok::<_, Failure>(Rotation { cos, sin })
        };
        let rotations = tensors.rotations.iter().map(rotation);
        let rotations = rotations.collect::<Result<Vec<_>>>()?;
        let cpu = self.cpu.get();
        let step = Step { form: cpu.form, team: &cpu.team, groups, rotations: &rotations, guesses };
        // SAFETY: the caller's promise.
        let mut x = unsafe { tensors.x.rows_mut::<E>()? };
        let each = self.layers.iter().zip(linears).zip(layer_groups);
        let places = tensors.states.iter().zip(&tensors.guessed);
        let layers = each.zip(places).map(|(((layer, linears), &group), (states, guessed))| {
            let group = (group, groups[group].plan.attention());
            // SAFETY: the caller's promise; layers use what they share one after the other.
            unsafe {
                let states = (parts_of(states, steps)?, guessed.rows_mut::<E>()?);
                let layer = layer.get();
                layer.read::<E>(self.eps, self.hidden, group, states, linears)
            }
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let mut scratch = Scratch::new(x.rows(), self.hidden, &layers)?;
        // SAFETY: the caller's promise.
        let own = unsafe { tensors.own_inputs.map(|own| own.rows::<E>()).transpose()? };
        let mut first = 0;
        for ((layer, cache), &group) in layers.iter().zip(&tensors.caches).zip(layer_groups) {
            // SAFETY: the caller's promise; layers of several groups may share a cache, one after
            // the other.
            let mut cache = unsafe {
                match layer.mixer {
                    Mixer::Attention(_) => attentions[group].pages::<E>(cache)?,
                    _ => KvPagesMut::Numbers(cache.rows_mut()?),
                }
            };
            let width = layer.own_input.as_ref().map(|own| own.out.inputs());
            let own = own.zip(width).map(|(own, width)| {
                first += width;
                own.columns(first - width..first)
            });
            step.forward(layer, &mut cache, own, &mut x, &mut scratch)?;
        }
        Ok(())
    }

    /// # Safety
    /// The addresses are those of numbers of type E, and of float32 for the states.
    unsafe fn replay<E: LayerElement>(
        &self,
        steps: &[&PlannedStep],
        states: &States,
        counts: (&[usize], &[usize]),
        guessed: &[Matrix],
    ) -> Result<()> {
        let cpu = self.cpu.get();
        for ((layer, states), guessed) in self.layers.iter().zip(states).zip(guessed) {
            let Some(delta) = layer.get().delta() else {
                continue;
            };
            // SAFETY: the caller's promise; layers use what they share one after the other.
            let (rule, parts, x) = unsafe {
                let parts = parts_of(states, steps)?;
                (delta.rule()?, parts, guessed.rows::<E>()?)
            };
            replay_delta_rule(cpu.form, &cpu.team, &rule, &parts, counts, x)?;
        }
        Ok(())
    }

    /// Numbers of a token that pass the states of each layer.
    fn inputs_of_states(&self) -> Vec<usize> {
        let deltas = self.layers.iter().map(|layer| layer.get().delta());
        deltas.map(|delta| delta.map_or(0, |delta| delta.heads().inputs())).collect()
    }

    /// The attention of each layer has its heads; all are of one type.
    fn check_attentions(
        &self,
        attentions: &[&PagedAttention],
        layer_groups: &[usize],
    ) -> Result<()> {
        for (index, paged) in attentions.iter().enumerate() {
            let attention = &paged.attention;
            let same = paged.dtype == self.dtype;
            let mut layers = self.layers.iter().zip(layer_groups);
            let fits = |(layer, &group): (&Py<DecoderLayer>, &usize)| {
                group != index || layer.get().has_heads_of(attention)
            };
            let argument = Argument::element("attentions", index);
            let fit = same && layers.all(fits);
            ensure!(fit, argument, "must have the type and the heads of the layers");
        }
        Ok(())
    }

    /// Each layer has a cache, and a group that there is.
    fn check_places(&self, layer_groups: &[usize], caches: usize, groups: usize) -> Result<()> {
        let layers = self.layers.len();
        for (name, count) in [("layer_groups", layer_groups.len()), ("caches", caches)] {
            ensure!(
                count == layers,
                name,
                "must have one for each of {layers} layers, not {count}"
            );
        }
        for (layer, &group) in layer_groups.iter().enumerate() {
            let argument = Argument::element("layer_groups", layer);
            ensure!(group < groups, argument, "must be below {groups}, the number of attentions");
        }
        Ok(())
    }

    /// The places of each layer's state, in parts of pages that its tokens alone are written to.
    fn states(
        &self,
        places: &[StatePlace],
        attentions: &[&PagedAttention],
        steps: &[&PlannedStep],
    ) -> Result<States> {
        let mut states = vec![Vec::new(); self.layers.len()];
        let mut left: Vec<_> = self.layers.iter().map(|layer| layer.get().state()).collect();
        for (number, place) in places.iter().enumerate() {
            let argument = Argument::element("states", number);
            let places = (attentions.get(place.group), left.get_mut(place.layer));
            let (Some(attention), Some(left)) = places else {
                let reason = "must be of a layer and of a group that there are";
                return Err(out_of_range(argument, reason));
            };
            let step = steps[place.group];
            let has_pages = step.plan.has_sequences_of(&steps[0].plan) && step.plan.writes_apart();
            let reason = "must have pages for the sequences of the first group, each of one alone";
            ensure!(has_pages, argument, "{reason}");
            let is_seen = sees_states(&attention.attention);
            ensure!(is_seen, argument, "must be of a group whose window is 2 tokens or more");
            let fits = place.numbers <= *left;
            ensure!(fits, argument, "must have no more numbers than the layer's state");
            *left -= place.numbers;
            let pages = attention.state_parts(step, place.address, place.numbers);
            states[place.layer].push((place.group, pages));
        }
        for (layer, &left) in left.iter().enumerate() {
            ensure!(left == 0, "states", "must have all numbers of the state of layer {layer}");
        }
        Ok(states)
    }

    /// The numbers of a head that each rotation turns: even ones, and of heads that are there.
    fn rotated(
        &self,
        given: Option<Vec<usize>>,
        rotations: usize,
        heads: &[usize],
    ) -> Result<Vec<usize>> {
        let whole = heads.iter().copied().max().unwrap_or(0);
        let rotated = given.unwrap_or_else(|| vec![whole; rotations]);
        let same = rotated.len() == rotations;
        ensure!(same, "rotated", "must have one for each of {rotations} rotations");
        for (layer, &head) in self.layers.iter().zip(heads) {
            for rope in layer.get().ropes() {
                let Some(&turned) = rotated.get(rope) else {
                    let reason =
                        format!("must have one for rope {rope} of a layer, not {rotations}");
                    return Err(out_of_range("rotations", reason));
                };
                let turns = (2..=head).contains(&turned) && turned % 2 == 0;
                ensure!(turns, "rotated", "must be even, and from 2 to {head}, not {turned}");
            }
        }
        Ok(rotated)
    }

    /// Numbers of a token that layers alone have, all of them together.
    fn own_width(&self) -> usize {
        let widths = self.layers.iter().map(|layer| layer.get().own_width());
        widths.fold(0, usize::saturating_add)
    }
}

#[pymethods]
impl DecoderStack {
    /// A stack of `layers`, which may differ, over a residual stream of `hidden` numbers.
    #[new]
    fn new(
        cpu: Py<Cpu>,
        dtype: OneOf<DType>,
        hidden: Number<names::Hidden>,
        eps: Real<names::Eps>,
        layers: List<names::Layers, Py<DecoderLayer>>,
    ) -> Result<Self> {
        let (dtype, hidden, eps, layers) = (dtype.0, hidden.0, eps.0, layers.0);
        for (number, layer) in layers.iter().enumerate() {
            let (argument, fits) =
                (Argument::element("layers", number), layer.get().fits(hidden, dtype));
            ensure!(fits, argument, "must have linears that fit the stream and each other");
        }
        Ok(Self { cpu, dtype, eps, hidden, layers, guessed: Exclusive::new(Guessed::default()) })
    }

    /// Take `x`, dense rows of the step that all `attentions` have planned, through all layers, in place.
    #[pyo3(signature = (
        attentions, layer_groups, caches, rotations, x, kept_tokens=None, *, rotated=None, states=None,
        page_stride=None, own_inputs=None, guesses=None
    ))]
    fn forward(
        &self,
        py: Python<'_>,
        attentions: List<names::Attentions, Py<PagedAttention>>,
        layer_groups: Numbers<names::LayerGroups>,
        caches: Numbers<names::Caches>,
        rotations: List<names::Rotations, Angles>,
        x: Number<names::X>,
        kept_tokens: Option<Number<names::KeptTokens>>,
        rotated: Option<Numbers<names::Rotated>>,
        states: Option<List<names::States, StatePlace>>,
        page_stride: Option<Number<names::PageStride>>,
        own_inputs: Option<Number<names::OwnInputs>>,
        guesses: Option<Numbers<names::Guesses>>,
    ) -> Result<()> {
        let attentions: Vec<_> = attentions.0.iter().map(Py::get).collect();
        let layer_groups = layer_groups.0;
        ensure!(!attentions.is_empty(), "attentions", "must have one for each group");
        self.check_places(&layer_groups, caches.0.len(), attentions.len())?;
        self.check_attentions(&attentions, &layer_groups)?;
        let planned = planned(&attentions)?;
        let steps = steps_of(&planned)?;
        let rows = steps[0].plan.num_queries();
        let head = |&group: &usize| attentions[group].attention.head_dim();
        let heads: Vec<_> = layer_groups.iter().map(head).collect();
        let given = rotated.map(|rotated| rotated.0);
        let rotated = self.rotated(given, rotations.0.len(), &heads)?;
        let kept_tokens = or(kept_tokens, 0);
        let cache = |((layer, &group), address): ((&Py<DecoderLayer>, &usize), usize)| {
            let address = Number::<names::Caches>::new(address);
            let (attention, step) = (attentions[group], steps[group]);
            if layer.get().state() > 0 {
                return Ok(Matrix::dense(address, 0, 0));
            }
            let page = attention.page_numbers(step);
            let width = match layer.get().least_kept(step.plan.block_size()) {
                None => page,
                Some(least) if kept_tokens < least => {
                    let reason = format!("must be at least {least} for a convolution");
                    return Err(out_of_range("kept_tokens", reason));
                }
                Some(_) => kept_tokens.saturating_mul(self.hidden),
            };
            let shape = (step.plan.num_pages(), width);
            Ok(Matrix::strided(address, shape, or(page_stride, page)))
        };
        let own_inputs = own_inputs.map(|own| Matrix::dense(own, rows, self.own_width()));
        let are_given = own_inputs.is_some() || self.own_width() == 0;
        ensure!(are_given, "own_inputs", "must be given for these layers");
        let guesses = or_empty(guesses);
        let fit = steps[0].plan.has_guesses(&guesses);
        ensure!(fit, "guesses", "must have a number for each sequence, of its rows at most");
        let mut guessed = self.guessed.use_as("the decoder")?;
        guessed.counts = guesses;
        let places = self.layers.iter().zip(&layer_groups).zip(caches.0);
        let angles = |(angles, turned): (Angles, usize)| {
            angles.0.map(|address| Matrix::dense(address, rows, turned / 2))
        };
        let tensors = Tensors {
            rotations: rotations.0.into_iter().zip(rotated).map(angles).collect(),
            x: Matrix::dense(x, rows, self.hidden),
            caches: places.map(cache).collect::<Result<_>>()?,
            own_inputs,
            states: self.states(&or_empty(states), &attentions, &steps)?,
            guessed: guessed.rows(&self.inputs_of_states(), self.dtype)?,
        };
        let groups = groups(&steps)?;
        let linears = self.layers.iter().map(|layer| layer.get().read_linears());
        let linears = linears.collect::<Result<Vec<_>>>()?;
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        py.detach(|| unsafe {
            let step = (steps.as_slice(), guessed.counts.as_slice());
            with_dtype!(self.dtype, E => {
                let layers = (attentions.as_slice(), layer_groups.as_slice());
                self.run::<E>(step, &groups, layers, &linears, &tensors)
            })
        })
    }

    /// Take the first `accepted` guesses of each sequence of the last `forward` into `states`.
    fn keep_accepted(
        &self,
        py: Python<'_>,
        attentions: List<names::Attentions, Py<PagedAttention>>,
        states: List<names::States, StatePlace>,
        accepted: Numbers<names::Accepted>,
    ) -> Result<()> {
        let attentions: Vec<_> = attentions.0.iter().map(Py::get).collect();
        let planned = planned(&attentions)?;
        let steps = steps_of(&planned)?;
        let mut guessed = self.guessed.use_as("the decoder")?;
        let (counts, accepted) = (guessed.counts.clone(), accepted.0);
        let pairs = || accepted.iter().zip(&counts);
        let are_there = |step: &&PlannedStep| step.plan.has_guesses(&counts);
        let fit = accepted.len() == counts.len()
            && pairs().all(|(some, all)| some <= all)
            && steps.first().is_some_and(are_there);
        ensure!(fit, "accepted", "must have a number for each sequence, of its guesses at most");
        let states = self.states(&states.0, &attentions, &steps)?;
        let rows = guessed.rows(&self.inputs_of_states(), self.dtype)?;
        let counts = (counts.as_slice(), accepted.as_slice());
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        py.detach(|| unsafe {
            with_dtype!(self.dtype, E => self.replay::<E>(&steps, &states, counts, &rows))
        })
    }
}

/// What each attention has planned, for one call.
fn planned<'a>(attentions: &[&'a PagedAttention]) -> Result<Vec<Using<'a, Option<PlannedStep>>>> {
    attentions.iter().map(|attention| attention.planned()).collect()
}

fn steps_of<'a>(planned: &'a [Using<'_, Option<PlannedStep>>]) -> Result<Vec<&'a PlannedStep>> {
    planned.iter().map(|step| PagedAttention::of_step(step)).collect()
}

/// The groups of a step, which all have planned the same number of rows.
fn groups<'a>(steps: &[&'a PlannedStep]) -> Result<Vec<Group<'a>>> {
    let rows = steps[0].plan.num_queries();
    let group = |(index, step): (usize, &&'a PlannedStep)| {
        let PlannedStep { plan, slots } = step;
        let planned = plan.num_queries();
        let argument = Argument::element("attentions", index);
        ensure!(
            planned == rows,
            argument,
            "must have planned {rows} rows, as the first, not {planned}"
        );
        Ok(Group { plan, slots })
    };
    steps.iter().enumerate().map(group).collect()
}
