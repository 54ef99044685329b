// A curve of any length in bounded memory, as `curve.py` has begun it: of each bucket the least and the most.

export class Curve {
  // `form`: see `Curve.form` in curve.py; `width`: how many numbers a point has, the value last.
  constructor(form, width) {
    Object.assign(this, form);
    this.width = width;
  }

  add(point) {
    if (this.buckets.length && this.count < this.stride) {
      this.count += 1;
      const last = this.buckets.length - 1;
      this.buckets[last] = this.extremes([...this.buckets[last], ...point]);
      return;
    }
    if (this.buckets.length === this.max) {
      const half = [];
      for (let i = 0; i < this.max; i += 2) half.push(this.extremes([...this.buckets[i], ...this.buckets[i + 1]]));
      this.buckets = half;
      this.stride *= 2;
    }
    this.count = 1;
    this.buckets.push([...point]);
  }

  extremes(numbers) {
    const width = this.width;
    let low = 0;
    let high = 0;
    for (let at = width; at < numbers.length; at += width) {
      const value = numbers[at + width - 1];
      if (value < numbers[low + width - 1]) low = at;
      else if (value > numbers[high + width - 1]) high = at;
    }
    const point = (at) => numbers.slice(at, at + width);
    if (low === high) return point(low);
    return low < high ? [...point(low), ...point(high)] : [...point(high), ...point(low)];
  }

  // The points over one of their numbers, which only grows: of what was trained again the later one counts.
  over(index, offset = 0) {
    const xs = [];
    const ys = [];
    for (let bucket = this.buckets.length - 1; bucket >= 0; bucket -= 1) {
      const numbers = this.buckets[bucket];
      for (let at = numbers.length - this.width; at >= 0; at -= this.width) {
        const x = numbers[at + index] + offset;
        if (xs.length && x >= xs[xs.length - 1]) continue;
        xs.push(x);
        ys.push(numbers[at + this.width - 1]);
      }
    }
    return [xs.reverse(), ys.reverse()];
  }

  get last() {
    const numbers = this.buckets.at(-1);
    return numbers ? numbers.at(-1) : null;
  }

  get extent() {
    let least = Infinity;
    let most = -Infinity;
    for (const numbers of this.buckets) {
      for (let at = this.width - 1; at < numbers.length; at += this.width) {
        if (numbers[at] < least) least = numbers[at];
        if (numbers[at] > most) most = numbers[at];
      }
    }
    return [least, most];
  }
}
