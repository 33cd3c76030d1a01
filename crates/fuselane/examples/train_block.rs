//! A transformer block, forward and backward, trained for a few steps.
//!
//! The block is the usual one: RMS norm, attention with rotary positions, RMS norm fused with the
//! residual sum, and an MLP gated by silu. fuselane's operators do all of it but the matrix
//! products, which are plain loops here; the chain rule is written out by hand.
//!
//! The task is to say which token stood two places before. Only attention that knows how far
//! apart tokens are can do it, so the loss falls far below what guessing reaches.
//!
//! ```text
//! cargo run --release --example train_block
//! ```

use fuselane::reference::Random;
use fuselane::{
    Act, Normalize, NormalizeBackward, NormalizeForward, Residual, Result, Rotate, RotateBackward,
    Softmax, Theta, View, ViewMut,
};

/// Batch, tokens, heads and features of a head.
const B: usize = 8;
const N: usize = 16;
const H: usize = 2;
const D: usize = 16;
/// All rows, the width of the model and of its MLP.
const ROWS: usize = B * N;
const C: usize = H * D;
const M: usize = 64;
/// How far back the token to be told stands.
const BACK: usize = 2;

fn main() -> Result<()> {
    let mut random = Random::new(1);
    let mut block = Block::new(&mut random)?;
    let embeddings = matrix(&mut random, 8, C, 1.0);
    let embed = |token: usize| &embeddings[token * C..(token + 1) * C];

    let mut losses = Vec::new();
    for step in 0..=300 {
        // Tokens that were not seen before, (ROWS, C), and those that stood BACK places before.
        let tokens: Vec<usize> = (0..ROWS).map(|_| random.below(8)).collect();
        let x: Vec<f32> = tokens.iter().flat_map(|&token| embed(token)).copied().collect();
        let mut target = vec![0.0; ROWS * C];
        for row in (0..ROWS).filter(|row| row % N >= BACK) {
            target[row * C..(row + 1) * C].copy_from_slice(embed(tokens[row - BACK]));
        }

        let kept = block.forward(&x)?;
        // Mean square error, and its gradient.
        let error: Vec<f32> = kept.out.iter().zip(&target).map(|(o, t)| o - t).collect();
        let loss = error.iter().map(|e| e * e).sum::<f32>() / error.len() as f32;
        let dout: Vec<f32> = error.iter().map(|e| 2.0 * e / error.len() as f32).collect();
        block.backward(&x, &kept, &dout)?;
        block.update(step + 1);
        if step % 30 == 0 {
            println!("step {step:3}  loss {loss:.4}");
        }
        losses.push(loss);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(last < 0.2 * first, "the loss fell from {first} to {last} only");
    Ok(())
}

/// A parameter with its gradient and the moments of Adam.
struct Parameter {
    value: Vec<f32>,
    gradient: Vec<f32>,
    moments: Vec<[f32; 2]>,
}

impl Parameter {
    fn new(value: Vec<f32>) -> Self {
        let len = value.len();
        Self { value, gradient: vec![0.0; len], moments: vec![[0.0; 2]; len] }
    }

    /// One step of Adam.
    fn update(&mut self, step: i32) {
        let (rate, decay) = (0.01, [0.9f32, 0.99]);
        let warm = decay.map(|decay| 1.0 - decay.powi(step));
        for ((value, g), m) in self.value.iter_mut().zip(&self.gradient).zip(&mut self.moments) {
            m[0] += (1.0 - decay[0]) * (g - m[0]);
            m[1] += (1.0 - decay[1]) * (g * g - m[1]);
            *value -= rate * (m[0] / warm[0]) / ((m[1] / warm[1]).sqrt() + 1e-8);
        }
    }
}

struct Block {
    norm: Normalize,
    softmax: Softmax,
    rotate: Rotate<'static>,
    /// (1, D / 2)
    theta: Vec<f32>,
    /// (C)
    attention_norm: Parameter,
    mlp_norm: Parameter,
    /// (C, C)
    query: Parameter,
    key: Parameter,
    value: Parameter,
    output: Parameter,
    /// (C, M)
    gate: Parameter,
    up: Parameter,
    /// (M, C)
    down: Parameter,
}

/// What the forward keeps for the backward.
struct Kept {
    /// The normalized input (ROWS, C), and 1 / sigma (ROWS, 1).
    h: Vec<f32>,
    rstd: Vec<f32>,
    /// Rotated queries and keys, and values: (ROWS, C), or (B, N, H, D).
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Attention (B, H, N, N), and what it gathers (ROWS, C).
    p: Vec<f32>,
    a: Vec<f32>,
    /// x + attention (ROWS, C), normalized (ROWS, C), and 1 / sigma (ROWS, 1).
    sum: Vec<f32>,
    h2: Vec<f32>,
    rstd2: Vec<f32>,
    /// The gate before and after silu, what it multiplies, and their product: (ROWS, M).
    g: Vec<f32>,
    silu: Vec<f32>,
    u: Vec<f32>,
    m: Vec<f32>,
    /// (ROWS, C)
    out: Vec<f32>,
}

/// The shape of activations as `rotate` takes them.
const HEADS: [usize; 4] = [B, N, H, D];
const ATTENTION: [usize; 4] = [B, H, N, N];

impl Block {
    fn new(random: &mut Random) -> Result<Self> {
        let mut weights = |rows, columns| {
            Parameter::new(matrix(random, rows, columns, 1.0 / (rows as f64).sqrt()))
        };
        Ok(Self {
            norm: Normalize::rms_norm(),
            softmax: Softmax::over(-1),
            rotate: Rotate::default(),
            theta: Theta { dim: D, base: 100.0, ..Theta::default() }.frequencies_f32()?,
            attention_norm: Parameter::new(vec![1.0; C]),
            mlp_norm: Parameter::new(vec![1.0; C]),
            query: weights(C, C),
            key: weights(C, C),
            value: weights(C, C),
            output: weights(C, C),
            gate: weights(C, M),
            up: weights(C, M),
            down: weights(M, C),
        })
    }

    fn forward(&self, x: &[f32]) -> Result<Kept> {
        let theta = View::new(&self.theta, &[1, D / 2])?;

        // h = rms_norm(x)
        let (mut h, mut rstd) = (vec![0.0; ROWS * C], vec![0.0; ROWS]);
        self.norm.forward_into(NormalizeForward {
            weight: Some(View::new(&self.attention_norm.value, &[C])?),
            rstd: Some(ViewMut::new(&mut rstd, &[ROWS, 1])?),
            ..NormalizeForward::new(View::new(x, &[ROWS, C])?, ViewMut::new(&mut h, &[ROWS, C])?)
        })?;

        // q, k = rotate(h Wq), rotate(h Wk);  v = h Wv
        let rotated = |weight: &Parameter| -> Result<Vec<f32>> {
            let plain = product(&h, &weight.value, [ROWS, C, C]);
            let mut o = vec![0.0; ROWS * C];
            let (plain, view) = (View::new(&plain, &HEADS)?, ViewMut::new(&mut o, &HEADS)?);
            self.rotate.forward_into(plain, theta, view)?;
            Ok(o)
        };
        let (q, k) = (rotated(&self.query)?, rotated(&self.key)?);
        let v = product(&h, &self.value.value, [ROWS, C, C]);

        // p = softmax(q k^T / sqrt(D)), of a token and those before it;  a = p v
        let mut scores = vec![f32::NEG_INFINITY; B * H * N * N];
        for_each_pair(|pair, query, key| {
            scores[pair] = dot(&q[query..query + D], &k[key..key + D]) / (D as f32).sqrt();
        });
        let mut p = vec![0.0; scores.len()];
        self.softmax
            .forward_into(View::new(&scores, &ATTENTION)?, ViewMut::new(&mut p, &ATTENTION)?)?;
        let mut a = vec![0.0; ROWS * C];
        for_each_pair(|pair, query, key| {
            add_scaled(&mut a[query..query + D], p[pair], &v[key..key + D])
        });

        // sum = x + a Wo, and h2 = rms_norm(sum), in one pass
        let attended = product(&a, &self.output.value, [ROWS, C, C]);
        let [mut sum, mut h2] = [(); 2].map(|()| vec![0.0; ROWS * C]);
        let mut rstd2 = vec![0.0; ROWS];
        let attended = View::new(&attended, &[ROWS, C])?;
        self.norm.forward_into(NormalizeForward {
            weight: Some(View::new(&self.mlp_norm.value, &[C])?),
            residual: Residual::AddInto(
                View::new(x, &[ROWS, C])?,
                ViewMut::new(&mut sum, &[ROWS, C])?,
            ),
            rstd: Some(ViewMut::new(&mut rstd2, &[ROWS, 1])?),
            ..NormalizeForward::new(attended, ViewMut::new(&mut h2, &[ROWS, C])?)
        })?;

        // m = silu(h2 Wg) * (h2 Wu);  out = sum + m Wd
        let g = product(&h2, &self.gate.value, [ROWS, C, M]);
        let u = product(&h2, &self.up.value, [ROWS, C, M]);
        let mut silu = vec![0.0; ROWS * M];
        let shape = [ROWS, M];
        Act::Silu.forward_into(View::new(&g, &shape)?, ViewMut::new(&mut silu, &shape)?)?;
        let m = times(&silu, &u);
        let mut out = product(&m, &self.down.value, [ROWS, M, C]);
        add_scaled(&mut out, 1.0, &sum);
        Ok(Kept { h, rstd, q, k, v, p, a, sum, h2, rstd2, g, silu, u, m, out })
    }

    /// Sets the gradient of each parameter, from the gradient of the output. Each step undoes one
    /// of the forward, last first.
    fn backward(&mut self, x: &[f32], kept: &Kept, dout: &[f32]) -> Result<()> {
        let theta = View::new(&self.theta, &[1, D / 2])?;

        // out = sum + m Wd
        self.down.gradient = product_tn(&kept.m, dout, [M, ROWS, C]);
        let dm = product_nt(dout, &self.down.value, [ROWS, C, M]);

        // m = silu(g) * u
        let (du, dsilu) = (times(&dm, &kept.silu), times(&dm, &kept.u));
        let mut dg = vec![0.0; ROWS * M];
        let shape = [ROWS, M];
        Act::Silu.backward_into(
            View::new(&kept.g, &shape)?,
            View::new(&dsilu, &shape)?,
            ViewMut::new(&mut dg, &shape)?,
        )?;

        // g, u = h2 Wg, h2 Wu
        self.gate.gradient = product_tn(&kept.h2, &dg, [C, ROWS, M]);
        self.up.gradient = product_tn(&kept.h2, &du, [C, ROWS, M]);
        let mut dh2 = product_nt(&dg, &self.gate.value, [ROWS, M, C]);
        add_scaled(&mut dh2, 1.0, &product_nt(&du, &self.up.value, [ROWS, M, C]));

        // h2 = rms_norm(sum); sum went to the output too, so dout arrives at it as well.
        let shape = [ROWS, C];
        let mut dsum = vec![0.0; ROWS * C];
        self.norm.backward_into(NormalizeBackward {
            weight: Some(View::new(&self.mlp_norm.value, &[C])?),
            grad_residual_out: Some(View::new(dout, &shape)?),
            dx: Some(ViewMut::new(&mut dsum, &shape)?),
            dweight: Some(ViewMut::new(&mut self.mlp_norm.gradient, &[C])?),
            ..NormalizeBackward::new(
                View::new(&dh2, &shape)?,
                View::new(&kept.sum, &shape)?,
                View::new(&kept.rstd2, &[ROWS, 1])?,
            )
        })?;

        // sum = x + a Wo
        self.output.gradient = product_tn(&kept.a, &dsum, [C, ROWS, C]);
        let da = product_nt(&dsum, &self.output.value, [ROWS, C, C]);

        // a = p v
        let (mut dp, mut dv) = (vec![0.0; kept.p.len()], vec![0.0; ROWS * C]);
        for_each_pair(|pair, query, key| {
            dp[pair] = dot(&da[query..query + D], &kept.v[key..key + D]);
            add_scaled(&mut dv[key..key + D], kept.p[pair], &da[query..query + D]);
        });

        // p = softmax(scores)
        let mut dscores = vec![0.0; dp.len()];
        self.softmax.backward_into(
            View::new(&kept.p, &ATTENTION)?,
            View::new(&dp, &ATTENTION)?,
            ViewMut::new(&mut dscores, &ATTENTION)?,
        )?;

        // scores = q k^T / sqrt(D)
        let [mut dq, mut dk] = [(); 2].map(|()| vec![0.0; ROWS * C]);
        for_each_pair(|pair, query, key| {
            let dscore = dscores[pair] / (D as f32).sqrt();
            add_scaled(&mut dq[query..query + D], dscore, &kept.k[key..key + D]);
            add_scaled(&mut dk[key..key + D], dscore, &kept.q[query..query + D]);
        });

        // q, k = rotate(h Wq), rotate(h Wk): gradients are turned back.
        let turned_back = |grad: &[f32]| -> Result<Vec<f32>> {
            let mut dx = vec![0.0; ROWS * C];
            self.rotate.backward_into(RotateBackward {
                x: None,
                grad: View::new(grad, &HEADS)?,
                angles: theta.into(),
                dx: Some(ViewMut::new(&mut dx, &HEADS)?),
                dtheta: None,
            })?;
            Ok(dx)
        };
        let gradients = [turned_back(&dq)?, turned_back(&dk)?, dv];
        let mut dh = vec![0.0; ROWS * C];
        for (weight, grad) in
            [&mut self.query, &mut self.key, &mut self.value].into_iter().zip(&gradients)
        {
            weight.gradient = product_tn(&kept.h, grad, [C, ROWS, C]);
            add_scaled(&mut dh, 1.0, &product_nt(grad, &weight.value, [ROWS, C, C]));
        }

        // h = rms_norm(x); x is data and needs no gradient.
        self.norm.backward_into(NormalizeBackward {
            weight: Some(View::new(&self.attention_norm.value, &[C])?),
            dweight: Some(ViewMut::new(&mut self.attention_norm.gradient, &[C])?),
            ..NormalizeBackward::new(
                View::new(&dh, &shape)?,
                View::new(x, &shape)?,
                View::new(&kept.rstd, &[ROWS, 1])?,
            )
        })
    }

    fn update(&mut self, step: i32) {
        for parameter in [
            &mut self.attention_norm,
            &mut self.mlp_norm,
            &mut self.query,
            &mut self.key,
            &mut self.value,
            &mut self.output,
            &mut self.gate,
            &mut self.up,
            &mut self.down,
        ] {
            parameter.update(step);
        }
    }
}

/// Shows each pair of a query and a key that it sees: the place of its score in (B, H, N, N), and
/// where the features of the two start in (B, N, H, D).
fn for_each_pair(mut visit: impl FnMut(usize, usize, usize)) {
    for batch in 0..B {
        for head in 0..H {
            for query in 0..N {
                for key in 0..=query {
                    let start = |token: usize| ((batch * N + token) * H + head) * D;
                    visit(((batch * H + head) * N + query) * N + key, start(query), start(key));
                }
            }
        }
    }
}

/// A B of (m, k) and (k, n).
fn product(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let mut o = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            add_scaled(&mut o[i * n..(i + 1) * n], a[i * k + l], &b[l * n..(l + 1) * n]);
        }
    }
    o
}

/// A^T B of (k, m) and (k, n).
fn product_tn(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let mut o = vec![0.0; m * n];
    for l in 0..k {
        for i in 0..m {
            add_scaled(&mut o[i * n..(i + 1) * n], a[l * m + i], &b[l * n..(l + 1) * n]);
        }
    }
    o
}

/// A B^T of (m, k) and (n, k).
fn product_nt(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let rows = |i: usize| (0..n).map(move |j| dot(&a[i * k..(i + 1) * k], &b[j * k..(j + 1) * k]));
    (0..m).flat_map(rows).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn times(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

/// o += scale * a
fn add_scaled(o: &mut [f32], scale: f32, a: &[f32]) {
    for (o, a) in o.iter_mut().zip(a) {
        *o += scale * a;
    }
}

/// Normal numbers of a deviation.
fn matrix(random: &mut Random, rows: usize, columns: usize, deviation: f64) -> Vec<f32> {
    (0..rows * columns).map(|_| (deviation * random.normal()) as f32).collect()
}
