//! A mixture of experts: each row goes through a few of many gated MLPs, and adds up what they make.
//!
//! The router scores the experts and chooses some ([`Router`]). The rows of each chosen expert are
//! gathered, multiplied with that expert's weights at once, and added where they came from:
//!
//! - A row's experts are ordered by their scores, the lower number first where two are equal. Its sum is
//!   taken in that order, in `f32`, and rounded once. So a row's result depends on that row alone,
//!   whichever rows are gathered with it.
//! - The weights of an expert that no row has chosen are not read.
//! - One more expert may be shared: all rows go through it, and it is added last.

mod route;

use prefixcache_cpu::lanes::vectors;
use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::{Element, Form, Lanes, Rows, RowsMut, Team};

use crate::linear::PackedLinear;
use crate::rowwise::{Gate, RowWork, each_row, gated};

use route::Routes;
pub use route::{Router, Scores};

/// Rows that one task gathers.
const GATHERED_ROWS: usize = 64;

/// The experts of a layer. Letters: N experts, E hidden size, F the size of an expert.
pub struct Experts<'a, E> {
    /// What chooses among them.
    pub router: Router<'a, E>,
    /// E to N * 2 F: for each expert its gates, then what they let pass; in one part or several.
    pub gate_up: &'a PackedLinear<E>,
    /// What opens the gates.
    pub gate: Gate,
    /// F to N * E, a part an expert.
    pub down: &'a PackedLinear<E>,
    /// What all rows go through too, where there is one.
    pub shared: Option<SharedExpert<'a, E>>,
}

/// An expert of all rows. Letters: S its size.
pub struct SharedExpert<'a, E> {
    /// E to 2 S: its gates, then what they let pass.
    pub gate_up: &'a PackedLinear<E>,
    /// What opens the gates.
    pub gate: Gate,
    /// S to E
    pub down: &'a PackedLinear<E>,
    /// E to 1, whose sigmoid weighs what it makes, where there is one.
    pub weight: Option<&'a PackedLinear<E>>,
}

impl<E: Element> Experts<'_, E> {
    /// Numbers that `rows` rows become when they are gathered, as `width` numbers each.
    fn gathered(&self, rows: usize, width: usize) -> usize {
        rows.saturating_mul(self.router.top_k).saturating_mul(width)
    }

    /// Outputs of an expert's `gate_up`.
    fn wide(&self) -> usize {
        2 * self.down.inputs()
    }

    /// The size of the shared expert.
    fn shared_size(&self) -> usize {
        let shared = self.shared.as_ref();
        shared.map_or(0, |shared| shared.down.inputs())
    }

    /// Numbers that are opened of `rows` rows, at once.
    fn opened(&self, rows: usize) -> usize {
        let shared = rows.saturating_mul(self.shared_size());
        self.gathered(rows, self.down.inputs()).max(shared)
    }
}

/// Room for what passes between the kernels; one layer after the other uses it.
#[derive(Default)]
pub struct Scratch<E> {
    logits: Vec<f32>,
    x: Vec<E>,
    gate_up: Vec<E>,
    opened: Vec<E>,
    down: Vec<f32>,
    shared: Vec<f32>,
    shared_weights: Vec<f32>,
}

impl<E: Element> Scratch<E> {
    /// Room for `rows` rows in any of these layers.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new<'a>(
        rows: usize,
        layers: impl Iterator<Item = &'a Experts<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        let most = |size: fn(&Experts<'_, E>, usize) -> usize| {
            layers.clone().map(|layer| size(layer, rows)).max().unwrap_or(0)
        };
        let room = |size| filled(E::from_f32(0.0), 1, most(size));
        Ok(Self {
            logits: filled(0.0, rows, most(|layer, _| layer.router.linear.outputs()))?,
            x: room(|layer, rows| layer.gathered(rows, layer.gate_up.inputs()))?,
            gate_up: room(|layer, rows| layer.opened(rows).saturating_mul(2))?,
            opened: room(|layer, rows| layer.opened(rows))?,
            down: filled(0.0, 1, most(|layer, rows| layer.gathered(rows, layer.gate_up.inputs())))?,
            shared: filled(
                0.0,
                rows,
                most(|layer, _| layer.shared.as_ref().map_or(0, |one| one.down.outputs())),
            )?,
            shared_weights: filled(0.0, 1, rows)?,
        })
    }
}

impl<E: Element> Experts<'_, E> {
    /// Writes the sum of what each row's experts make of it, plus the residual, to `out`.
    ///
    /// The router reads the rows of `chosen_by`, which may be x.
    ///
    /// # Errors
    /// There is no memory for the routes or quantized activations; `out` is as it was.
    ///
    /// # Panics
    /// The shapes do not fit each other or the scratch.
    #[expect(clippy::too_many_arguments, reason = "each is another operand")]
    pub fn forward(
        &self,
        form: Form,
        team: &Team,
        chosen_by: Rows<'_, E>,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, E>>,
        out: &RowsMut<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        let (rows, hidden) = x.shape();
        assert_eq!(chosen_by.rows(), rows, "rows of the router");
        assert_eq!(x.shape(), out.shape(), "shape of out");
        if let Some(residual) = &residual {
            assert_eq!(residual.shape(), out.shape(), "residual");
        }
        if let Some(shared) = &self.shared {
            self.share(shared, form, team, x, scratch)?;
        }
        let experts = self.router.linear.outputs();
        let mut logits = rows_mut(&mut scratch.logits, rows, experts);
        let linear = self.router.linear;
        linear.forward(form, team, chosen_by, None::<Rows<'_, f32>>, &logits)?;
        let routes = Routes::new(&self.router, team, logits.read())?;
        let gathered = routes.tokens.len();
        let mut picked = rows_mut(&mut scratch.x, gathered, hidden);
        gather(team, x, &routes.tokens, &picked);
        let mut gate_up = rows_mut(&mut scratch.gate_up, gathered, self.wide());
        let groups = routes.groups(self.gate_up.parts() / experts);
        self.gate_up.forward_groups(form, team, picked.read(), &groups, &gate_up)?;
        let mut opened = rows_mut(&mut scratch.opened, gathered, self.down.inputs());
        gated(form, team, self.gate, gate_up.read(), &opened);
        let mut down = rows_mut(&mut scratch.down, gathered, hidden);
        let groups = routes.groups(1);
        self.down.forward_groups(form, team, opened.read(), &groups, &down)?;
        let shared = self.shared.as_ref().map(|shared| Shared {
            made: Rows::new(&scratch.shared[..rows * hidden], hidden),
            weights: shared.weight.map(|_| &scratch.shared_weights[..rows]),
        });
        let work = WeightedSum { routes: &routes, down: down.read(), shared, residual };
        each_row(form, team, hidden, out, &work);
        Ok(())
    }

    /// Writes what the shared expert makes of each row, and the logits of its weights.
    fn share(
        &self,
        shared: &SharedExpert<'_, E>,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        let ((rows, hidden), size) = (x.shape(), self.shared_size());
        let none = None::<Rows<'_, f32>>;
        let mut gate_up = rows_mut(&mut scratch.gate_up, rows, 2 * size);
        let mut opened = rows_mut(&mut scratch.opened, rows, size);
        shared.gate_up.forward_gated(form, team, x, shared.gate, &mut gate_up, &opened)?;
        let made = rows_mut(&mut scratch.shared, rows, hidden);
        shared.down.forward(form, team, opened.read(), none, &made)?;
        if let Some(linear) = shared.weight {
            let logits = rows_mut(&mut scratch.shared_weights, rows, 1);
            linear.forward(form, team, x, none, &logits)?;
        }
        Ok(())
    }
}

fn rows_mut<T>(numbers: &mut [T], rows: usize, width: usize) -> RowsMut<'_, T> {
    RowsMut::new(&mut numbers[..rows * width], width)
}

/// Copies the rows with these numbers.
fn gather<E: Element>(team: &Team, x: Rows<'_, E>, numbers: &[usize], out: &RowsMut<'_, E>) {
    team.run_chunks(numbers.len(), GATHERED_ROWS, |rows| {
        for row in rows {
            // SAFETY: a row belongs to one task.
            let to = unsafe { out.part(row, 0, out.width()) };
            to.copy_from_slice(x.row(numbers[row]));
        }
    });
}

/// What the shared expert made of the rows, and the logits of its weights.
struct Shared<'a> {
    made: Rows<'a, f32>,
    weights: Option<&'a [f32]>,
}

/// Adds up what a row's experts made of it, in the order of their scores.
struct WeightedSum<'a, E> {
    routes: &'a Routes,
    down: Rows<'a, f32>,
    shared: Option<Shared<'a>>,
    residual: Option<Rows<'a, E>>,
}

impl<E: Element> RowWork<E> for WeightedSum<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(&self, lanes: L, row: usize, out: &mut [E]) {
        let chosen = self.routes.of_row(row);
        for (at, count) in vectors::<L>(out.len()) {
            let mut sum = lanes.splat(0.0);
            for (&place, &weight) in chosen.places.iter().zip(chosen.weights) {
                let made = self.down.row(place)[at..][..count].as_ptr();
                // SAFETY: the slice holds `count` numbers.
                let made = unsafe { f32::load_some(lanes, made, count) };
                sum = lanes.mul_add(lanes.splat(weight), made, sum);
            }
            if let Some(Shared { made, weights }) = &self.shared {
                let made = made.row(row)[at..][..count].as_ptr();
                // SAFETY: the slice holds `count` numbers.
                let made = unsafe { f32::load_some(lanes, made, count) };
                let weighed = match weights {
                    None => made,
                    Some(logits) => lanes.times_sigmoid(made, lanes.splat(-logits[row])),
                };
                sum = lanes.add(sum, weighed);
            }
            if let Some(residual) = &self.residual {
                let numbers = residual.row(row)[at..][..count].as_ptr();
                // SAFETY: the slice holds `count` numbers.
                sum = lanes.add(sum, unsafe { E::load_some(lanes, numbers, count) });
            }
            // SAFETY: `count` numbers stand at `at`.
            unsafe { E::store_some(lanes, out[at..].as_mut_ptr(), sum, count) };
        }
    }
}

#[cfg(test)]
mod tests {
    use prefixcache_cpu::{Form, Rows, RowsMut, Team};

    use super::route::Routes;
    use super::{Router, Scores, WeightedSum};
    use crate::linear::PackedLinear;
    use crate::rowwise::each_row;

    const EXPERTS: usize = 5;
    const WIDTH: usize = 16;

    fn noise(count: usize) -> Vec<f32> {
        let number = |i: usize| (i * 7919 % 1013) as f32 / 500.0 - 1.0;
        (0..count).map(number).collect()
    }

    /// The sums of rows that go to three experts each, whose results are the rows of a table. With the
    /// fault a row's experts are added in an order that depends on how many rows there are.
    fn sums(logits: &[f32], tables: &[f32], has_fault: bool) -> Vec<f32> {
        let (form, team) = (Form::detect(), Team::new(1).expect("threads"));
        let linear = PackedLinear::<f32>::new(1, &[EXPERTS], false).expect("memory");
        let router = Router {
            linear: &linear,
            scores: Scores::Softmax,
            selection_bias: None,
            top_k: 3,
            renormalise: Some(0.0),
            scale: 1.0,
            expert_scales: None,
        };
        let rows = logits.len() / EXPERTS;
        let mut routes = Routes::new(&router, &team, Rows::new(logits, EXPERTS)).expect("memory");
        let mut made = vec![0.0; 3 * rows * WIDTH];
        for group in routes.groups(1) {
            for place in group.rows {
                let from = (routes.tokens[place] * EXPERTS + group.parts.start) * WIDTH;
                made[place * WIDTH..][..WIDTH].copy_from_slice(&tables[from..][..WIDTH]);
            }
        }
        if has_fault {
            routes.rotate(rows);
        }
        let mut out = vec![0.0_f32; rows * WIDTH];
        let work = WeightedSum {
            routes: &routes,
            down: Rows::new(&made, WIDTH),
            shared: None,
            residual: None,
        };
        let out_rows = RowsMut::new(&mut out, WIDTH);
        each_row(form, &team, WIDTH, &out_rows, &work);
        out
    }

    fn rows_that_companions_change(has_fault: bool) -> usize {
        const ROWS: usize = 41; // rotates by another number than one row
        let (logits, tables) = (noise(ROWS * EXPERTS), noise(ROWS * EXPERTS * WIDTH));
        let together = sums(&logits, &tables, has_fault);
        let changed = (0..ROWS).filter(|row| {
            let logits = &logits[row * EXPERTS..][..EXPERTS];
            let tables = &tables[row * EXPERTS * WIDTH..][..EXPERTS * WIDTH];
            sums(logits, tables, has_fault) != together[row * WIDTH..][..WIDTH]
        });
        changed.count()
    }

    #[test]
    fn a_fault_in_the_order_of_experts_would_be_found() {
        assert_eq!(rows_that_companions_change(false), 0);
        assert!(rows_that_companions_change(true) > 20);
    }
}
