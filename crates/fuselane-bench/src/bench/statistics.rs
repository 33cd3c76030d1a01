//! Medians and spreads of repeated measurements.

/// The middle of some measurements, and how far they spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    /// A fifth of the measurements is at most this.
    pub(super) p20: f64,
    /// A fifth of the measurements is at least this.
    pub(super) p80: f64,
}

impl Spread {
    /// None for no measurements.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 0.5)?,
            p20: quantile(&sorted, 0.2)?,
            p80: quantile(&sorted, 0.8)?,
        })
    }

    /// The spread relative to the median: small when another round would change little.
    pub(super) fn width(&self) -> f64 {
        if self.median > 0.0 { (self.p80 - self.p20) / self.median } else { 0.0 }
    }
}

/// A quantile of sorted values, interpolated between the two nearest.
fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = q * last as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    let part = at - low as f64;
    // A lone infinity must not become NaN.
    Some(if low == high { sorted[low] } else { sorted[low] * (1.0 - part) + sorted[high] * part })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        let spread = Spread::of(&[5.0, 1.0, 4.0, 2.0, 3.0, 6.0]).unwrap();
        assert_eq!((spread.p20, spread.median, spread.p80), (2.0, 3.5, 5.0));
        let one = Spread::of(&[7.0]).unwrap();
        assert_eq!((one.p20, one.median, one.p80), (7.0, 7.0, 7.0));
        assert_eq!(Spread::of(&[]), None);
        let two = Spread::of(&[1.0, 2.0]).unwrap();
        assert!(
            (two.p20 - 1.2).abs() < 1e-12 && two.median == 1.5 && (two.p80 - 1.8).abs() < 1e-12
        );
    }

    /// One slow call, as on a shared machine, moves the median by no more than one place.
    #[test]
    fn an_outlier_hardly_counts() {
        let mut values = vec![1.0; 20];
        values.push(1000.0);
        let spread = Spread::of(&values).unwrap();
        assert_eq!((spread.median, spread.p80, spread.width()), (1.0, 1.0, 0.0));
    }

    #[test]
    fn widths() {
        let spread = Spread { median: 2.0, p20: 1.9, p80: 2.3 };
        assert!((spread.width() - 0.2).abs() < 1e-12);
        assert_eq!(Spread { median: 0.0, p20: 0.0, p80: 0.0 }.width(), 0.0);
    }
}
