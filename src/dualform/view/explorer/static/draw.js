// A canvas to draw on, by mouse, finger or keyboard, and the pixels of it as the training images have them.

const SIZE = 280;

export class Pad {
  constructor(canvas, height, width, onchange, ondone) {
    this.canvas = canvas;
    this.height = height;
    this.width = width;
    this.onchange = onchange;
    this.ondone = ondone;
    this.enabled = false;
    this.last = null;
    this.cursor = [SIZE / 2, SIZE / 2];
    canvas.width = canvas.height = SIZE;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.#up());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    this.clear();
  }

  clear() {
    this.context.fillStyle = "#fff";
    this.context.fillRect(0, 0, SIZE, SIZE);
    this.marked = false;
  }

  // Show pixels (0 … 255, light ink on a dark ground) as dark ink on a light ground.
  show(pixels) {
    const image = new ImageData(this.width, this.height);
    pixels.forEach((value, at) => image.data.set([255 - value, 255 - value, 255 - value, 255], 4 * at));
    const small = new OffscreenCanvas(this.width, this.height);
    small.getContext("2d").putImageData(image, 0, 0);
    this.clear();
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(small, 0, 0, SIZE, SIZE);
    this.marked = pixels.some((value) => value > 0);
  }

  // What was drawn, as MNIST was made: the ink fitted into 20 of 28 pixels, its centre of mass in the middle.
  pixels() {
    const ink = this.#ink();
    if (ink === null) return new Uint8Array(this.height * this.width);
    const [left, top, right, bottom] = ink;
    const box = (20 / 28) * Math.min(this.height, this.width);
    const scale = box / Math.max(right - left, bottom - top);
    const fitted = this.#fitted(left - ((this.width / scale) - (right - left)) / 2, top - ((this.height / scale) - (bottom - top)) / 2, 1 / scale);
    let mass = 0, x = 0, y = 0;
    fitted.forEach((value, at) => {
      mass += value;
      x += value * (at % this.width);
      y += value * Math.floor(at / this.width);
    });
    const dx = Math.round((this.width - 1) / 2 - x / mass), dy = Math.round((this.height - 1) / 2 - y / mass);
    const moved = new Uint8Array(this.height * this.width);
    fitted.forEach((value, at) => {
      const column = (at % this.width) + dx, row = Math.floor(at / this.width) + dy;
      if (column >= 0 && column < this.width && row >= 0 && row < this.height) moved[row * this.width + column] = value;
    });
    return moved;
  }

  // The mean ink of every pixel, each of which covers a square of the canvas.
  #fitted(left, top, side) {
    const data = this.context.getImageData(0, 0, SIZE, SIZE).data;
    const ink = (x, y) => (x < 0 || y < 0 || x >= SIZE || y >= SIZE ? 0 : 255 - data[4 * (y * SIZE + x)]);
    return Uint8Array.from({ length: this.height * this.width }, (_, at) => {
      const x0 = Math.round(left + (at % this.width) * side), y0 = Math.round(top + Math.floor(at / this.width) * side);
      const size = Math.max(1, Math.round(side));
      let sum = 0;
      for (let y = y0; y < y0 + size; y++) for (let x = x0; x < x0 + size; x++) sum += ink(x, y);
      return Math.round(sum / (size * size));
    });
  }

  #ink() {
    const data = this.context.getImageData(0, 0, SIZE, SIZE).data;
    let left = SIZE, top = SIZE, right = -1, bottom = -1;
    for (let y = 0; y < SIZE; y++) {
      for (let x = 0; x < SIZE; x++) {
        if (data[4 * (y * SIZE + x)] < 200) {
          left = Math.min(left, x); right = Math.max(right, x + 1);
          top = Math.min(top, y); bottom = Math.max(bottom, y + 1);
        }
      }
    }
    return right < 0 ? null : [left, top, right, bottom];
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIZE, ((event.clientY - box.top) / box.height) * SIZE];
  }

  #down(event) {
    if (!this.enabled) return;
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    this.last = this.#point(event);
    this.#stroke(this.last, this.last);
  }

  #move(event) {
    if (!this.enabled || this.last === null) return;
    const point = this.#point(event);
    this.#stroke(this.last, point);
    this.last = point;
  }

  #up() {
    if (this.last === null) return;
    this.last = null;
    this.ondone();
  }

  // Arrows move a cursor, with the space bar held down (or Shift) they draw; Escape clears.
  #key(event) {
    if (!this.enabled) return;
    const moves = { ArrowLeft: [-10, 0], ArrowRight: [10, 0], ArrowUp: [0, -10], ArrowDown: [0, 10] };
    if (event.key in moves) {
      const [dx, dy] = moves[event.key];
      const next = [clamp(this.cursor[0] + dx), clamp(this.cursor[1] + dy)];
      if (event.shiftKey) {
        this.#stroke(this.cursor, next);
        this.ondone();
      }
      this.cursor = next;
    } else if (event.key === " ") {
      this.#stroke(this.cursor, this.cursor);
      this.ondone();
    } else if (event.key === "Escape") {
      this.clear();
      this.ondone();
    } else return;
    event.preventDefault();
  }

  #stroke(from, to) {
    this.context.strokeStyle = "#000";
    this.context.lineWidth = 22;
    this.context.lineCap = this.context.lineJoin = "round";
    this.context.beginPath();
    this.context.moveTo(...from);
    this.context.lineTo(to[0] + 0.01, to[1]);
    this.context.stroke();
    this.marked = true;
    this.onchange();
  }
}

function clamp(value) {
  return Math.min(SIZE - 10, Math.max(10, value));
}

export function toText(pixels) {
  return btoa(String.fromCharCode(...pixels)).replaceAll("+", "-").replaceAll("/", "_");
}

export function fromText(text) {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
}
