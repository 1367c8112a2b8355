// Products and attention of the kernels against the same in double, for processors on which Python cannot run the tests.
// Prints the words of a pair and of a quad of activations in a panel, then the largest error as a share of its bound.
#include <cmath>
#include <cstdio>
#include <random>

#include "abi.cpp"

namespace {

std::mt19937 engine(1);

std::vector<float> numbers(size_t count) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> made(count);
    for (float& x : made) x = from_bf16(to_bf16(uniform(engine)));
    return made;
}

// Activations that the format does not round: of bfloat16, or integers with a scale of 1.
template <class G>
std::vector<float> activations(int rows, int inputs) {
    std::vector<float> x = numbers(size_t(rows) * inputs);
    if (std::is_base_of_v<Grouped, G>)
        for (size_t i = 0; i < x.size(); ++i) x[i] = i % inputs % GROUP == 0 ? 127.0f : std::rint(x[i] * 127);
    return x;
}

template <class G>
double product_error(Kept kept, int outputs, int inputs, int rows) {
    const std::vector<float> weights = numbers(size_t(outputs) * inputs), x = activations<G>(rows, inputs);
    std::vector<float> out(size_t(rows) * outputs), row(inputs);
    Team team(2);
    Arena arena;
    Matrix m;
    m.outputs = outputs, m.inputs = inputs, m.kept = kept;
    pack_as_kept<Bf16>(team, arena, m, weights.data(), Source::F32, nullptr);
    const int depth = G::panel_depth(inputs);
    std::vector<uint32_t> data(size_t(rows) * (depth + Panel::PADDING)), words(depth);
    const Panel panel = panel_of<G>(data.data(), rows, inputs, by_tiles<G>(rows, false));
    for (int r = 0; r < rows; ++r) put_row<G>(panel, r, x.data() + size_t(r) * inputs, inputs, words.data());
    team.run(1, [&](int me) { multiply<G>(team, me, m, panel, Into{m, out.data(), size_t(outputs), false}); });
    double worst = 0;
    for (int n = 0; n < outputs; ++n) {
        unpack_row<G>(m, n, row.data());
        for (int r = 0; r < rows; ++r) {
            double want = 0, size = 0;
            for (int i = 0; i < inputs; ++i) {
                const double product = double(row[i]) * x[size_t(r) * inputs + i];
                want += product, size += std::fabs(product);
            }
            worst = std::max(worst, std::fabs(out[size_t(r) * outputs + n] - want) / (1e-6 * size));
        }
    }
    return worst;
}

// One sequence of `keys`, of which the last `rows` are queries. Weights of the softmax are rounded to bfloat16.
double attention_error(int keys, int rows, int head_dim) {
    constexpr int KV_HEADS = 2, HEADS = 4;
    const std::vector<float> q = numbers(size_t(rows) * HEADS * head_dim);
    const std::vector<float> k = numbers(size_t(keys) * KV_HEADS * head_dim), v = numbers(k.size());
    std::vector<uint16_t> pool_k(k.size()), pool_v(v.size());
    for (size_t i = 0; i < k.size(); ++i) pool_k[i] = to_bf16(k[i]), pool_v[i] = to_bf16(v[i]);
    std::vector<int32_t> slots(keys);
    for (int i = 0; i < keys; ++i) slots[i] = i;
    std::vector<float> out(q.size());
    const int32_t start = keys - rows, length = rows;
    TrellisAttention a{};
    a.extends = 1, a.heads = HEADS, a.kv_heads = KV_HEADS, a.head_dim = head_dim, a.format = 1, a.scale = 1;
    a.lengths = &length, a.starts = &start, a.slots = slots.data();
    a.queries = q.data(), a.keys = pool_k.data(), a.values = pool_v.data(), a.out = out.data();
    void* team;
    if (trellis_new_team(2, &team) || trellis_attend(team, &a)) return INFINITY;
    trellis_free_team(team);
    double worst = 0;
    for (int r = 0; r < rows; ++r)
        for (int h = 0; h < HEADS; ++h) {
            std::vector<double> sums(head_dim);
            double total = 0;
            for (int j = 0; j <= start + r; ++j) {
                const size_t at = (size_t(j) * KV_HEADS + h / (HEADS / KV_HEADS)) * head_dim;
                double score = 0;
                for (int i = 0; i < head_dim; ++i) score += double(q[(size_t(r) * HEADS + h) * head_dim + i]) * k[at + i];
                total += std::exp(score);
                for (int i = 0; i < head_dim; ++i) sums[i] += std::exp(score) * v[at + i];
            }
            for (int i = 0; i < head_dim; ++i)
                worst = std::max(worst, std::fabs(out[(size_t(r) * HEADS + h) * head_dim + i] - sums[i] / total) / 0.01);
        }
    return worst;
}

}  // namespace

int main() {
    double worst = 0;
    for (int rows : {1, 2, 3, 5, 8, 13})
        for (int inputs : {20, 64, 130}) {
            worst = std::max(worst, product_error<Bf16>(Kept::OWN, 37, inputs, rows));
            worst = std::max(worst, product_error<Q8>(Kept::Q8, 37, inputs, rows));
            worst = std::max(worst, product_error<Q4>(Kept::Q4, 37, inputs, rows));
        }
    for (int rows : {1, 2, 9})
        for (int head_dim : {8, 24, 64}) worst = std::max(worst, attention_error(150, rows, head_dim));
    std::printf("%d %d %g\n", Bf16::PANEL_WORDS, QUAD, worst);
}
