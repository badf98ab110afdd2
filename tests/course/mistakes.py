"""Mistakes in the exercises, which must lose points, and right solutions that are written differently, which must not.

`handout.py check` grades all of them, `--flawed` chooses a mistake. A mistake is pairs of texts (old, new) that change
lines of the original functions. If it was made in public, the thread is named. A right solution may also be the source
of functions.
"""
MISTAKES, RIGHT = {}, {}                # {exercise: {what: solution}}

MISTAKES['multi_similarity_loss'] = {
    'miner along columns': (
        '.amin(dim=1, keepdim=True)', '.amin(dim=0, keepdim=True)', '.amax(dim=1, keepdim=True)',
        '.amax(dim=0, keepdim=True)'),
    'miner over the whole batch': ('.amin(dim=1, keepdim=True)', '.amin()', '.amax(dim=1, keepdim=True)', '.amax()'),
    'miner on negatives only': ('positive & ~easy_positive', 'positive'),
    'mean over anchors with a positive': ('(pull + push).mean()', '(pull + push)[positive.any(dim=1)].mean()'),
    'anchor excluded by value': (
        'mine(s, y, epsilon)\n', 'mine(s, y, epsilon)\n    positive = positive & (s < 1 - 1e-5)\n'),
    'exp overflows': (
        'log1p_sum_exp(beta * (s - lam), negative)', '((beta * (s - lam)).exp() * negative).sum(dim=1).log1p()'),
    'one of the two embeddings detached': ('z @ z.T', 'z @ z.T.detach()'),
    'without the 1 +': (
        'log1p_sum_exp(beta * (s - lam), negative)',
        '(beta * (s - lam)).masked_fill(~negative, -1e9).logsumexp(dim=1)'),
    'no miner with epsilon 0': ('if epsilon is None else', 'if not epsilon else'),
    'miner keeps equally hard pairs': (
        's - epsilon >= hardest_negative', 's - epsilon > hardest_negative',
        's + epsilon <= hardest_positive', 's + epsilon < hardest_positive'),
}
MISTAKES['contrastive_loss'] = {
    'mean over all pairs': ('t.sum() / (t > 0).sum().clamp_min(1)', 't.mean()'),
    'one mean for both kinds': ('return mean_nonzero(pull) + mean_nonzero(push)', 'return mean_nonzero(pull + push)'),
    'an image is its own positive': ('.masked_fill(~positive, 0)', '.masked_fill(negative, 0)'),
    'NaN without positives': ('.clamp_min(1)', ''),
    'only pairs above the mean, so none if there is one (sentence-transformers 4020)': (
        't.sum() / (t > 0).sum().clamp_min(1)',
        't[t > t.sum() / (t > 0).sum().clamp_min(1)].sum() / (t > 0).sum().clamp_min(1)'),
    'squared for plain distances': ('distances(z)', 'distances(z).square()'),
    'images detached': ('distances(z)', 'distances(z.detach())'),
    'power 1 for positives': ('.pow(power).masked_fill(~positive', '.masked_fill(~positive'),
    'negatives at distance 0 excluded': ('masked_fill(~negative, 0)', 'masked_fill(~negative | (d == 0), 0)'),
    'a constant if the loss is 0': (
        'return mean_nonzero(pull) + mean_nonzero(push)',
        'loss = mean_nonzero(pull) + mean_nonzero(push)\n    return loss if loss > 0 else loss.detach()'),
    'only for sorted labels': ('= pairs(y)', '= pairs(torch.cat([0 * y[:1], (y[1:] != y[:-1]).long()]).cumsum(0))'),
}
MISTAKES['contrastive_similarity_loss'] = {
    'margin on positives': (
        'pull = -s.masked_fill(~positive, 0)', 'pull = (margin - s).clamp_min(0).masked_fill(~positive, 0)'),
    'mean over anchors with a positive': ('(pull + push).mean()', '(pull + push)[positive.any(dim=1)].mean()'),
    'mean over all negatives': ('(excess > 0).sum(dim=1)', 'negative.sum(dim=1)'),
    'anchor excluded by value': ('~positive, 0', '~(positive & (s < 1 - 1e-5)), 0'),
    'one of the two embeddings detached': ('z @ z.T', 'z @ z.T.detach()'),
}
MISTAKES['proxy_anchor_loss'] = {
    'proxies not normalised': ('F.normalize(proxies, dim=1)', 'proxies'),
    'no gradient for the proxies, as if they were outside the optimizer (Proxy-Anchor 25)': (
        'F.normalize(proxies, dim=1)', 'F.normalize(proxies, dim=1).detach()'),
    'positive term divided by all classes': ('.sum() / num_present', '.mean()'),
    'negative term divided by the classes present': ('~positive).mean()', '~positive).sum() / num_present'),
    'negative term of present proxies only': ('~positive).mean()', '~positive)[positive.any(dim=1)].mean()'),
    'margin of negatives with minus': ('(s + delta), ~positive', '(s - delta), ~positive'),
    'exp overflows': (
        'log1p_sum_exp(alpha * (s + delta), ~positive)',
        '((alpha * (s + delta)).exp() * ~positive).sum(dim=1).log1p()'),
    'classes present counted by label changes': (
        'num_present = positive.any(dim=1).sum()', 'num_present = 1 + (y[1:] != y[:-1]).sum()'),
}
MISTAKES['proxynca_loss'] = {
    'scale 1/T': ('2 / temperature', '1 / temperature'),
    'proxies not normalised': ('cosines(z, proxies)', 'z @ proxies.T'),
    'positive proxy in the denominator (pytorch-metric-learning 206)': (
        "others = logits.masked_fill(positive, float('-inf'))", 'others = logits'),
    'mean': ('- logit).sum()', '- logit).mean()'),
    'infinite with one class': ('len(proxies) == 1', 'len(proxies) == 0'),
}
MISTAKES['proxynca_pp_loss'] = {
    'scale 1/T': ('2 / temperature', '1 / temperature'),
    'proxies not normalised': ('cosines(z, proxies)', 'z @ proxies.T'),
    'proxies detached': ('cosines(z, proxies)', 'cosines(z, proxies.detach())'),
    'a sum': ('cosines(z, proxies), y)', "cosines(z, proxies), y, reduction='sum')"),
    'distances for squared distances': (
        '2 / temperature * cosines(z, proxies)',
        '-torch.cdist(z, F.normalize(proxies)) / temperature'),
}
MISTAKES['center_contrastive_loss'] = {
    'stop_grad ignored': ('(c.detach() if stop_grad else c)', 'c'),
    'stop_grad also in the centre term': (
        '(c.detach() if stop_grad else c)', 'c', '(z * c[y])', '(z * (c.detach() if stop_grad else c)[y])'),
    'smoothing ignored': ('smooth_labels(y, len(c), smoothing, logits.dtype)', 'y'),
    "torch's smoothing": ('smooth_labels(y, len(c), smoothing, logits.dtype)', 'y, label_smoothing=smoothing'),
    'centre term smoothed': ('lam * center', '(1 - smoothing) * lam * center'),
    'margin on all cosines': ('margin * positive', 'margin * torch.ones_like(positive)'),
    'margin not scaled': ('s * (cosine - margin * positive)', 's * cosine - margin * positive'),
    'centres not normalised': ('c = F.normalize(centers, dim=1)', 'c = centers'),
    'distance to raw centres': ('2 - 2 * (z * c[y]).sum(dim=1)', '(z - centers[y]).square().sum(dim=1)'),
    'centres detached': ('F.normalize(centers, dim=1)', 'F.normalize(centers.detach(), dim=1)'),
    'images normalised again': (
        'c = F.normalize(centers, dim=1)', 'z, c = F.normalize(z, dim=1), F.normalize(centers, dim=1)'),
    'exp overflows': (
        "F.cross_entropy(logits, smooth_labels(y, len(c), smoothing, logits.dtype), reduction='none')",
        '-(smooth_labels(y, len(c), smoothing) * F.normalize(logits.exp(), p=1).log()).sum(dim=1)'),
}
MISTAKES['hybrid_loss'] = {
    'maximum of s times mask': (
        'most_similar(s, negative)', '(s * negative).max(dim=1)[0], negative.any(dim=1)',
        'most_similar(s, weak_positive)', '(s * weak_positive).max(dim=1)[0], weak_positive.any(dim=1)'),
    'no guard for negatives': ('(has_hn & has_ewp)', 'has_ewp'),
    'no guard for weak positives': ('(has_hn & has_ewp)', 'has_hn'),
    'no guard for zero hybrids': ('.sum() / max(len(h), 1)', '.mean()'),
    'mean over hybrids that have both': ('max(len(h), 1)', '(has_hn & has_ewp).sum().clamp_min(1)'),
    'hybrids detached': ('s = h @', 's = h.detach() @'),
    'all images except weak positives': ('most_similar(s, negative)', 'most_similar(s, ~weak_positive)'),
    'all negatives': (
        'F.logsigmoid(s_ewp - s_hn)',
        "F.logsigmoid(s_ewp - s.masked_fill(~negative, float('-inf')).logsumexp(dim=1))"),
    'exp overflows': ('F.logsigmoid(s_ewp - s_hn)', '(1 / (1 + s_hn.exp() / s_ewp.exp())).log()'),
    "log_softmax averaged over both columns (MMT 18, HSE's Algorithm 1)": (
        'F.logsigmoid(s_ewp - s_hn)', 'torch.stack([s_ewp, s_hn], dim=1).log_softmax(dim=1).mean(dim=1)'),
}
MISTAKES['epshn_loss'] = {
    'hardest negative': ('negative & (s < s_p[:, None])', 'negative'),
    'a tie is semi-hard': ('s < s_p', 's <= s_p'),
    'mean over all anchors': ('keep.sum().clamp_min(1)', 'len(z)'),
    'NaN without anchors': ('.clamp_min(1)', ''),
    'anchor excluded by value': (
        'positive, negative = pairs(y)', 'positive, negative = (y[:, None] == y) & (s < 1 - 1e-5), y[:, None] != y'),
    'one of the two embeddings detached': ('z @ z.T', 'z @ z.T.detach()'),
    'a constant without anchors': (
        'keep = has_p & has_n', 'keep = has_p & has_n\n    if not keep.any():\n        return z.new_zeros(())'),
    'exp overflows': (
        'F.logsigmoid((s_p - s_n) / temperature)',
        '((s_p / temperature).exp() / ((s_p / temperature).exp() + (s_n / temperature).exp())).log()'),
}
MISTAKES['positivity_threshold'] = {
    'm with minus': ('+ m', '- m'),
    'inverse odds': ('torch.as_tensor(lam, dtype=torch.float64).logit()', '-torch.as_tensor(lam).logit()'),
    'log2': ('.logit()', '.logit() / torch.tensor(2.0).log()'),
    'log of lambda only': ('torch.as_tensor(lam, dtype=torch.float64).logit()', 'torch.log(lam)'),
    'float32 inside': ('torch.as_tensor(lam, dtype=torch.float64)', 'torch.as_tensor(lam)'),
    'clamped near 0 and 1': ('.logit()', '.logit(1e-6)'),
}
MISTAKES['mixed_pairs'] = {
    'weights swapped': (
        'lam * binary[:, i] + (1 - lam) * binary[:, j]', '(1 - lam) * binary[:, i] + lam * binary[:, j]'),
    'no weight for the second example': (' + (1 - lam) * binary[:, j]', ''),
    'the anchor has label 0': ('positive | itself', 'positive'),
    'only the first example': (' | (second[:, i] & first[:, j])', ''),
    'at least one example': (
        '(first[:, i] & second[:, j]) | (second[:, i] & first[:, j])', 'first[:, i] | second[:, i] | first[:, j]'),
    'an image is its own positive': ('== y) & is_image & ~itself', '== y) & is_image'),
    'anchors are the batch': ('(y[anchor][:, None] == y)', '(y[:len(anchor), None] == y)'),
    'each pair twice': ('.triu(1)', ''),
    'all negatives': ('if config.k is not None:', 'if config.k is None:'),
    'pairs that no anchor uses': ('(mixes | mixes.T)', 'torch.ones(E, E)'),
    'only pairs whose first candidate comes first': ('(mixes | mixes.T)', 'mixes'),
}
MISTAKES['mix_features'] = {
    'all mixed maps in forward': (
        'zip(i.split(at_a_time), j.split(at_a_time), lam.split(at_a_time))', '[(i, j, lam)]'),
    'pooled before mixup': ('f_j.lerp(f_i, lam)', 'mix(f.amax(dim=(2, 3)), i, j, lam[:, 0])'),
    'weights swapped': ('mix(f.mean(dim=(2, 3)), i, j, lam)', 'mix(f.mean(dim=(2, 3)), j, i, lam)'),
    'averages detached': ('mix(f.mean(dim=(2, 3)), i, j, lam)', 'mix(f.mean(dim=(2, 3)).detach(), i, j, lam)'),
    'half precision not upcast': ('f = common.at_least_float32(f)', ''),
    'positions in a byte': ('[1].flatten(1)', '[1].flatten(1).byte().long()'),
}
MISTAKES['retrieval_metrics'] = {
    'the query is not excluded': ('None if within else gallery', 'gallery'),
    'a query is its own match': (' - int(within) ', ' '),
    'R@K is R@1': ('hit[:, :k].any', 'hit[:, :1].any'),
    'precision at K': ('hit[:, :k].any(dim=1)', 'hit[:, :k].float().mean(dim=1)'),
    'no match: excluded from R@K': ('column.mean()', 'column[matches.cpu() > 0].mean()'),
    'no match: counts in RP and MAP@R': ('values[matched, -2:]', 'values[:, -2:].nan_to_num()', 'max(1, matched.sum())',
                                         'len(values)'),
    'no match: not counted': ('if not matched.all()', 'if False'),
    # TorchDR pull request 295; mteb 1154, 5376; pytorch-metric-learning 464
    'the first result is excluded, not the query': (
        'None if within else gallery, depth):', 'gallery, depth + within):\n        index = index[:, int(within):]'),
    'R of the first query': ('matches[rows]', 'matches[:1].expand(len(rows))'),
    'no error for NaN in the gallery': (', (gallery, gallery_labels))', ',)'),
    'precision at non-matches': ('/ i * hit', '/ i'),
    'matches after the R nearest': ('hit & (i <= r[:, None])', 'hit'),
    'only the first 8 are retrieved': ('max(*ks, int(matches.max()))', 'max(ks)'),
    'labels of the first block': ('query_labels[rows, None]', 'query_labels[:len(rows), None]'),
    'class numbers of the gallery': (', minlength=int(labels.max()) + 1', ''),
}
MISTAKES['triplet_loss'] = {
    'mean over all triplets': ('(cost > 0).sum().clamp_min(1)', 'exists.sum().clamp_min(1)'),
    'NaN without triplets': ('.clamp_min(1)', ''),
    'an image is its own positive': (
        'positive = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device)', 'positive = same'),
    'squared distances': ("torch.cdist(z, z, compute_mode='donot_use_mm_for_euclid_dist')", '2 - 2 * z @ z.T'),
    'margin with minus': ('d[:, None, :] + margin', 'd[:, None, :] - margin'),
    'positive and negative swapped': ('d[:, :, None] - d[:, None, :]', 'd[:, None, :] - d[:, :, None]'),
    'farthest negative': ("d.masked_fill(same, float('inf')).amin(", "d.masked_fill(same, -float('inf')).amax("),
    'negatives detached': ('d[:, :, None] - d[:, None, :]', 'd[:, :, None] - d[:, None, :].detach()'),
}
MISTAKES['utilization'] = {
    'mean over the examples': ('nearest(queries, examples)', 'nearest(examples, queries)'),
    'distances not squared': ('(2 - 2 * s).clamp(min=0).mean()', '(2 - 2 * s).clamp(min=0).sqrt().mean()'),
    'farthest example': ('nearest(queries, examples)', 'nearest(-queries, examples)'),
    'a sum': ('.mean().item()', '.sum().item()'),
    'cosine distance': ('2 - 2 * s', '1 - s'),
}
MISTAKES['labelled_loss'] = {
    'labels ignored': ('label * valid, (1 - label) * valid', '(label > 0.5) * valid, (label <= 0.5) * valid'),
    'invalid examples are negatives': ('label * valid, (1 - label) * valid', 'label * valid, 1 - label * valid'),
    'labels swapped': ('label * valid, (1 - label) * valid', '(1 - label) * valid, label * valid'),
    'negatives with weight 1': ('(1 - label) * valid', '(label < 1) * valid'),
    'only the positive term': ('return pull + push', 'return pull'),
    'negative term with minus': ('return pull + push', 'return pull - push'),
    'mean over the anchors': ('return pull + push', 'return (pull + push).mean()'),
}
MISTAKES['ms'] = {
    'weights in the exponent': (
        'log1p_sum_exp(-beta * (s - m), pos_weight)', 'log1p_sum_exp(-beta * pos_weight * (s - m), pos_weight > 0)'),
    'weights used as masks': (
        'log1p_sum_exp(-beta * (s - m), pos_weight)', 'log1p_sum_exp(-beta * (s - m), pos_weight > 0)',
        'log1p_sum_exp(gamma * (s - m), neg_weight)', 'log1p_sum_exp(gamma * (s - m), neg_weight > 0)'),
    'scales swapped': ('pos_weight) / beta', 'pos_weight) / gamma', 'neg_weight) / gamma', 'neg_weight) / beta'),
    'signs swapped': (
        '-beta * (s - m)', 'beta * (s - m)', 'gamma * (s - m), neg_weight', '-gamma * (s - m), neg_weight'),
    'no division': ('pos_weight) / beta', 'pos_weight)', 'neg_weight) / gamma', 'neg_weight)'),
    'without the 1 +': ('F.pad(t + weight.log(), (1, 0)).logsumexp(dim=1)', '(t + weight.log()).logsumexp(dim=1)'),
    'm for negatives with plus': ('gamma * (s - m)', 'gamma * (s + m)'),
    'weight of 0 replaced by 1e-6': ('weight.log()', '(weight + 1e-6).log()'),
}
MISTAKES['sampler'] = {
    'a class twice in a batch': ('[item for item in items if item not in queue] or items', 'items'),
    'left-over classes come last': ('queue.pop(0)', 'queue.pop()'),
    'not shuffled': ('torch.randperm(len(others), generator=self.generator).tolist()', 'range(len(others))'),
    'without the generator': (', generator=self.generator', ''),
    'all images of a class again in each batch': ('take(image_queues[c]', 'take([]'),
    'all classes again in each batch': ('take(class_queue', 'take([]'),
}
MISTAKES['embedder'] = {
    'not normalized': ('F.normalize(z, dim=1) if self.normalize else z', 'z'),
    'always normalized': (' if self.normalize else z', ''),
    'normalized over the batch': ('F.normalize(z, dim=1)', 'F.normalize(z, dim=0)'),
    'LayerNorm left out': ('self.norm(p)', 'p'),
    'maximum for average': ('F.adaptive_avg_pool2d', 'F.adaptive_max_pool2d'),
    'the maximum replaces the average': ("if 'avg' in self.pool", "if self.pool == 'avg'"),
    'pooled in half precision': ('f = at_least_float32(f)', ''),
}

RIGHT['multi_similarity_loss'] = {'anchor by anchor': '''
@common.loss
def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=None):
    s, zero, total = z @ z.T, z.new_zeros(1), 0
    positive, negative = pairs(y) if epsilon is None else mine(s, y, epsilon)
    for a in range(len(y)):
        p, n = s[a][positive[a]], s[a][negative[a]]
        total = total + torch.cat([zero, -alpha * (p - lam)]).logsumexp(0) / alpha
        total = total + torch.cat([zero, beta * (n - lam)]).logsumexp(0) / beta
    return total / len(y)


def mine(s, y, epsilon):
    positive, negative = pairs(y)
    for a in range(len(y)):
        p, n = s[a][positive[a]], s[a][negative[a]]
        if len(p) and len(n):
            positive[a] &= s[a] - epsilon < n.max()
            negative[a] &= s[a] + epsilon > p.min()
        else:
            positive[a] = negative[a] = False
    return positive, negative
'''}
RIGHT['retrieval_metrics'] = {'query by query': '''
def retrieval_metrics(query, query_labels, gallery=None, gallery_labels=None, ks=(1, 2, 4, 8)):
    within, rows = gallery is None, []
    ranked, labels = (query, query_labels) if within else (gallery, gallery_labels)
    for z, y in (query, query_labels), (ranked, labels):
        if y.shape != (len(z),) or not len(z) or not z.isfinite().all():
            raise UsageError('nothing, not finite, or other labels')
    matches = [int((labels == label).sum()) - within for label in query_labels]
    for block, _, index in k_nearest(query, gallery, min(max(*ks, *matches), len(ranked) - within)):
        for i, others in zip(block, labels[index]):
            hit, r, rank = others == query_labels[i], matches[i], torch.arange(1, len(others) + 1)
            p = (hit.cumsum(0) / rank * hit)[:r]
            rows.append([hit[:k].any() for k in ks] + [hit[:r].sum() / max(r, 1), p.sum() / max(r, 1), r > 0])
    rows = torch.tensor(rows, dtype=torch.float64)
    some = max(1, int(rows[:, -1].sum()))
    metrics = {f'R@{k}': 100 * float(rows[:, n].mean()) for n, k in enumerate(ks)}
    metrics |= {'RP': 100 * float(rows[:, -3].sum()) / some, 'MAP@R': 100 * float(rows[:, -2].sum()) / some}
    unmatched = len(rows) - int(rows[:, -1].sum())
    return metrics | ({'unmatched': unmatched} if unmatched else {})
'''}
RIGHT['mixed_pairs'] = {'anchor by anchor': '''
def mixed_pairs(config, z, y, anchor, num_images):
    ends = range(num_images), range(len(y) if config.pairs == 'anc-neg' else num_images)
    pairs = [(i, j) for i in ends[0] for j in ends[1] if i < j and bool(y[i] == y[j]) == (config.pairs == 'pos-pos')]
    lam, members = dict(zip(pairs, Beta(config.alpha, config.alpha).sample((len(pairs),)))), []
    for a in anchor.tolist():
        positive = {n for n in range(num_images) if y[n] == y[a] and n != a}
        ranked = (z @ z[a]).argsort(descending=True).tolist()
        negative = set([n for n in ranked if n < num_images and y[n] != y[a]][:config.k])
        first = {a} if config.pairs == 'anc-neg' else positive
        second = positive if config.pairs == 'pos-pos' else negative
        own = [(i, j) for i, j in pairs if i in first and j in second or j in first and i in second]
        members.append({(i, j): 1 if config.pairs == 'pos-pos' else lam[i, j] if i in first else 1 - lam[i, j]
                        for i, j in own})
    pairs = [pair for pair in pairs if any(pair in own for own in members)]
    label = [[own.get(pair, 0) for pair in pairs] for own in members]
    i, j = torch.tensor(pairs, dtype=torch.long).view(-1, 2).T
    shape = len(anchor), len(pairs)
    return (i, j, torch.tensor([lam[pair] for pair in pairs]), torch.tensor(label).view(shape),
            torch.tensor([[pair in own for pair in pairs] for own in members]).view(shape))
'''}
