//! Percentiles and the bound of a ratio. Pure.

use crate::random::{Random, SPREAD};

/// The order statistics that are told of a series.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Summary {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Of a series that is not empty; all zero for one that is.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self {
            p50: rank(&sorted, 0.5),
            p90: rank(&sorted, 0.9),
            p99: rank(&sorted, 0.99),
            max: rank(&sorted, 1.0),
        }
    }
}

/// A ratio of medians and the value that it lies below with 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Ratio {
    pub median: f64,
    pub upper_95: f64,
}

/// Resamplings of the bootstrap.
const RESAMPLES: usize = 10_000;

impl Ratio {
    /// Of `ours` to `theirs`, taken in pairs, round by round.
    ///
    /// Pairs are drawn together: what disturbed a round disturbed both.
    pub fn of(ours: &[f64], theirs: &[f64]) -> Self {
        let pairs = ours.len().min(theirs.len());
        let (ours, theirs) = (&ours[..pairs], &theirs[..pairs]);
        let median = |series: &[f64]| Summary::of(series).p50;
        // The same draws every time, so that a report can be checked from its samples.
        let mut random = Random::new(SPREAD);
        let mut ratios: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let drawn: Vec<usize> = (0..pairs)
                    .map(|_| random.below(pairs as u64) as usize)
                    .collect();
                let pick = |series: &[f64]| {
                    median(&drawn.iter().map(|index| series[*index]).collect::<Vec<_>>())
                };
                pick(ours) / pick(theirs)
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        Self {
            median: median(ours) / median(theirs),
            upper_95: rank(&ratios, 0.95),
        }
    }
}

/// The smallest value that a share `at` of the series does not exceed.
fn rank(sorted: &[f64], at: f64) -> f64 {
    let index = (sorted.len() as f64 * at).ceil() as usize;
    sorted
        .get(index.clamp(1, sorted.len().max(1)) - 1)
        .copied()
        .unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_series() {
        let series: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let summary = Summary::of(&series);
        assert_eq!(
            (summary.p50, summary.p90, summary.p99, summary.max),
            (50.0, 90.0, 99.0, 100.0)
        );
        assert_eq!(Summary::of(&[7.0]).p50, 7.0);
        assert_eq!(Summary::of(&[]).max, 0.0);
    }

    #[test]
    fn a_constant_ratio_has_a_tight_bound() {
        let theirs: Vec<f64> = (10..50).map(f64::from).collect();
        let ours: Vec<f64> = theirs.iter().map(|value| value / 2.0).collect();
        let ratio = Ratio::of(&ours, &theirs);
        assert!((ratio.median - 0.5).abs() < 1e-9 && (ratio.upper_95 - 0.5).abs() < 1e-9);
    }

    #[test]
    fn noise_widens_the_bound_upwards() {
        let theirs = [10.0; 40];
        let ours: Vec<f64> = (0..40)
            .map(|index| {
                if index % 3 == 0 {
                    30.0
                } else {
                    10.0 + f64::from(index) / 10.0
                }
            })
            .collect();
        let ratio = Ratio::of(&ours, &theirs);
        assert!(ratio.upper_95 >= ratio.median);
    }
}
